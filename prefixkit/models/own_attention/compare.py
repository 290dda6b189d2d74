"""Compares replacements with the code that they replace: both attend over the same short text.

A class that has changed since its replacement was written gives different results, and is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from prefixkit.attention.variants import lookup
from prefixkit.attention.visible import Visible
from prefixkit.models.attention_class import original_class, run_on
from prefixkit.models.bound_forwards import become, subclass
from prefixkit.models.families import text_config
from prefixkit.models.layered_cache import Bias
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.own_attention.known import own_code
from prefixkit.models.requirements import CACHE
from prefixkit.models.variants.layer_scores import register_variant

_SHORT, _LONG = 12, 512  # tokens of a text; the long text exceeds windows shorter than it


def compare_own_code(
    model: PreTrainedModel, call: Callable[..., Any], layers: dict[str, nn.Module], tokens: Tensor
) -> None:
    """Raise UnsupportedModel unless layers with code of their own compute the same on a tree as without one.

    Args:
        model: The model.
        call: Runs the model, with a cache of transformers.
        layers: The model's attention modules, by name.
        tokens: Token ids from which the text is made, on the device that the model runs on.
    """
    classes = {module: original_class(module) for module in layers.values()}
    names = {
        module: name
        for name, module in layers.items()
        if own_code(classes[module]) is not None  # type: ignore[arg-type]  # classes hash
    }
    if not names:
        return
    seen = _Seen(names)
    _run(call, seen, tokens, _SHORT)
    most = getattr(text_config(model), "max_position_embeddings", None) or _LONG
    windows = [window for window in seen.windows if _SHORT <= window < min(most, _LONG)]
    if windows:
        _run(call, seen, tokens, min(max(windows) + 4, most))


class _Seen:
    """What a comparison records: the modules' names, and the windows that their replacements ask for."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.names, self.windows = names, set[int]()


def _run(call: Callable[..., Any], seen: _Seen, tokens: Tensor, length: int) -> None:
    at = torch.arange(length, device=tokens.device)
    before = {module: type(module) for module in seen.names}
    try:
        for module in before:
            become(module, _comparing_class(original_class(module), seen))
        call(input_ids=tokens[at * at % len(tokens)][None], use_cache=True, **{CACHE: DynamicCache()})
    finally:
        for module, cls in before.items():
            become(module, cls)


def _comparing_class(original: type[nn.Module], seen: _Seen) -> type[nn.Module]:
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        theirs = original.forward(self, *args, **kwargs)
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if cache is not None:
            _compare(self, seen, cache, args, kwargs, theirs[0])
        return theirs

    return subclass(original, None, {"forward": forward})


def _compare(
    module: nn.Module, seen: _Seen, cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any], theirs: Tensor
) -> None:
    """Refuse a module if its result and its replacement's, which attends in float64, differ by more than rounding."""
    plain, moved = (_ReferenceLayer(moved) for moved in (False, True))
    where = (
        f"{seen.names[module]} ({original_class(module).__name__}) has attention code of its own, and what prefixkit"
    )
    try:
        ours, others = (run_on(layer, module, cache, args, kwargs)[0] for layer in (plain, moved))
    except Exception as error:
        raise UnsupportedModel(f"{where} runs in its place fails: {type(error).__name__}: {error}") from error
    allowed = (others - ours).abs().max() + 16 * torch.finfo(ours.dtype).eps * ours.abs().max()
    seen.windows |= plain.windows
    if ours.shape != theirs.shape or not (difference := (ours - theirs).abs().max()) <= 2 * allowed:
        raise UnsupportedModel(
            f"{where} runs in its place differs from it by {difference:.1e}: this version of transformers computes "
            "something else, or its mask is not causal"
        )


class _ReferenceLayer:
    """A layer's cache over the text of one forward pass; it attends in float64.

    Args:
        moved: Move each result up or down by as much as rounding could.
    """

    def __init__(self, moved: bool) -> None:
        self.windows, self._moved = set[int](), moved

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._kv = key_states, value_states
        return key_states, value_states

    def check(self, key: Tensor, value: Tensor, attention_mask: Any) -> None:
        """Check nothing: the probe checks masks."""

    def attend(
        self,
        query: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Tensor | None,
        bias: Bias | None = None,
    ) -> Tensor:
        q, k, v = (of.double() for of in (query, *self._kv))
        k, v = (of.repeat_interleave(q.shape[1] // of.shape[1], 1) for of in (k, v))
        at = torch.arange(q.shape[2], device=q.device)
        none, heads = torch.zeros((), dtype=torch.int64, device=q.device), torch.arange(q.shape[1], device=q.device)
        places = none, heads[:, None, None], at[:, None], at[None]
        variant = lookup(register_variant(Visible(window), cap, False, None if bias is None else bias()))
        scores, visible = q @ k.transpose(2, 3) * scale, places[3] <= places[2]
        eps = max(torch.finfo(of.dtype).eps for of in (*self._kv, torch.empty(0)))
        scores, visible = variant.change(scores, *places), visible & variant.shows(*places)
        if window is not None:
            self.windows.add(window)
        scores = scores.masked_fill(~visible, -torch.inf)
        largest = scores.masked_fill(~visible, 0).abs().max()
        out = (scores.softmax(3) @ v).transpose(1, 2)
        if self._moved:  # products round before the softmax, weights and values after it
            signs = torch.randint(0, 2, out.shape, generator=torch.Generator().manual_seed(0)).to(out.device) * 2 - 1
            out = out + signs * eps * (16 + 4 * largest) * v.abs().max()
        return out.to(query.dtype)
