"""Modules that do not run when a model computes text: cross-attention without an encoder, layers for images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from prefixkit.models.attention_class import forward_below
from prefixkit.models.variants.layer_variants import trial

_TOKENS = 4


def idle_modules(model: PreTrainedModel, modules: Sequence[nn.Module]) -> set[nn.Module]:
    """Those of ``modules`` that a pass over a few tokens does not call; none if the model cannot run such a pass."""
    called = set[nn.Module]()

    def note(module: nn.Module, *given: Any) -> None:
        called.add(module)

    hooks = [module.register_forward_pre_hook(note) for module in modules]
    try:
        with trial(model):
            forward_below(model)(input_ids=torch.arange(_TOKENS, device=model.device)[None], use_cache=False)
    except Exception:
        return set()
    finally:
        for hook in hooks:
            hook.remove()
    return set(modules) - called
