"""What replaces an attention class's own code on a tree, and functions that replacements share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.models.layered_cache import Bias, LayerCache


@dataclass(frozen=True)
class OwnCode:
    """How an attention class runs on a tree if its ``forward`` does not call the attention interface on what it caches.

    One of the first three attributes replaces its code; the ``forward`` of the class computes the rest.

    Attributes:
        forward: Replaces ``forward``: the same arguments, with a :class:`LayerCache` as the cache.
        core: Replaces the method ``_attn``: ``core(module, layer, query, key, value, attention_mask)``.
        adapt: Wraps a layer's cache for a ``forward`` that follows the interface, but attends over other K and V than
            it caches.
        restore: Converts the pool's K and V, ``[rows, kv_heads, length, head_dim]``, to those that the class caches.
        index: The attribute that holds the layer's number.
    """

    forward: Callable[..., Any] | None = None
    core: Callable[..., tuple[Tensor, None]] | None = None
    adapt: Callable[[LayerCache], LayerCache] | None = None
    restore: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    index: str = "layer_idx"


def transformers_name(cls: type[nn.Module]) -> tuple[str, str] | None:
    """The folder and the name of a class that transformers defines for a model; None for any other class."""
    folder = cls.__module__.rpartition(".modeling_")[2]
    return (folder, cls.__qualname__) if cls.__module__ == f"transformers.models.{folder}.modeling_{folder}" else None


def attended(
    module: Any,
    layer: LayerCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    bias: Bias | None = None,
) -> Tensor:
    """Cache K and V, and attend to all visible tokens: ``[batch, rows, heads * head_dim]``."""
    k, v = layer.update(k, v, module.layer_idx)
    layer.check(k, v, mask)
    return layer.attend(q, scale, None, None, None, bias).flatten(2)


def function_of_module(module: nn.Module, name: str) -> Any:
    """The function of this name in the file that defines a module's class."""
    return getattr(sys.modules[type(module).__module__], name)


def shown(mask: Tensor | None) -> Tensor | None:
    """An additive mask, which may include biases, as a bool mask that is True where tokens are visible."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2
