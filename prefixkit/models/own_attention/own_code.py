"""What takes the place of an attention class's own code on a tree, and what replacements have in common."""

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
    """How an attention class runs on a tree whose ``forward`` does not leave attention to the attention interface.

    One of the first three says how; the ``forward`` of the class does the rest.

    Attributes:
        forward: In place of ``forward``: the same arguments, with a :class:`LayerCache` for the cache.
        core: In place of the method ``_attn``: ``core(module, layer, query, key, value, attention_mask)``.
        adapt: Makes of a layer's cache the one that ``forward`` gets, where that follows the interface with K and V
            that are not those it caches.
        restore: Makes of the K and V of the pool, ``[rows, kv_heads, length, head_dim]``, those that the class caches.
        index: The attribute with the layer's number.
    """

    forward: Callable[..., Any] | None = None
    core: Callable[..., tuple[Tensor, None]] | None = None
    adapt: Callable[[LayerCache], LayerCache] | None = None
    restore: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    index: str = "layer_idx"


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
    """Cache K and V, and attend to all that is visible: ``[batch, rows, heads * head_dim]``."""
    k, v = layer.update(k, v, module.layer_idx)
    layer.check(k, v, mask)
    return layer.attend(q, scale, None, None, None, bias).flatten(2)


def function_of_module(module: nn.Module, name: str) -> Any:
    """A function of the file that a module's class is in."""
    return getattr(sys.modules[type(module).__module__], name)


def shown(mask: Tensor | None) -> Tensor | None:
    """An additive mask, to which biases may have been added, as a mask that is True where tokens are visible."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2
