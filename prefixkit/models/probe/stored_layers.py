"""For which layers of a cache modules store KV: a looped model runs a module several times, for a layer each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from prefixkit.models.attention_class import forward_below
from prefixkit.models.states.taken_cache import cache_keyword, empty_cache
from prefixkit.models.variants.layer_variants import trial

_TOKENS = 4
# In the config of a looped model (Dory): which loops cache KV, and the value for each of them.
_LOOPS_CACHE, _EACH = "recurrent_kv_cache_mode", "per_loop"


def stored_layers(model: PreTrainedModel, modules: Sequence[nn.Module]) -> dict[nn.Module, list[int]]:
    """The layers of the cache for which each of ``modules`` stores KV in a pass over a few tokens, in order; empty if
    the model cannot run such a pass.
    """
    stored = dict[nn.Module, list[int]]()
    running = list[nn.Module]()
    cache: Any = empty_cache(model)
    update = cache.update

    def enter(module: nn.Module, *given: Any) -> None:
        running[:] = [module]

    def note(key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        for module in running:
            stored.setdefault(module, []).append(layer_idx)
        return update(key_states, value_states, layer_idx, *args, **kwargs)

    cache.update = note
    hooks = [module.register_forward_pre_hook(enter) for module in modules]
    try:
        with trial(model), getattr(next(model.parameters()), "fake_mode", None) or nullcontext():
            tokens = torch.arange(_TOKENS, device=model.device)[None]
            forward_below(model)(input_ids=tokens, use_cache=True, **{cache_keyword(model): cache})
    except Exception:
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return stored


def remedy_of_loops(module: nn.Module) -> str:
    """The end of an error about an attention module: the remedy if it belongs to a looped model of which only the last
    loop caches KV.
    """
    mode = getattr(getattr(module, "config", None), _LOOPS_CACHE, _EACH)
    if mode == _EACH:
        return ""
    return (
        f": with {_LOOPS_CACHE}={mode!r} a loop attends to KV that another loop has cached in an earlier pass, so that "
        f"results depend on where passes cut a text; load the model with {_LOOPS_CACHE}={_EACH!r}"
    )
