"""Models whose code outside their attention layers does not accept the mask or the positions of a step over a tree.

In such a step, and in no other call, the original ``forward`` runs on a shallow copy of the model with other
attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from prefixkit.models.attention_class import cache_among, original_class
from prefixkit.models.bound_forwards import subclass
from prefixkit.models.own_attention.own_code import transformers_name

Attributes = Callable[[Any, dict[str, Any]], dict[str, Any]]


def _falcon(body: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Layers compute ALiBi themselves, so the model must not build it, which it would do for every key."""
    return {"use_alibi": False}


def _bloom(body: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {"build_alibi_tensor": lambda mask, *args, **kwargs: mask}


def _roformer(body: Any, given: dict[str, Any]) -> dict[str, Any]:
    """RoFormer counts positions from the cache's length; here it embeds the positions that it was called with."""
    positions: Tensor | None = given.get("position_ids")
    if positions is None:
        return {}
    embed = body.embed_positions
    return {"embed_positions": lambda shape, *args: embed(shape, 0, positions[0])}


def _minimax(body: Any, given: dict[str, Any]) -> dict[str, Any]:
    """MiniMax accepts only its own cache class if ``use_cache`` is true; its layers accept any cache."""
    given["use_cache"] = False
    return {}


_KNOWN: dict[tuple[str, str] | None, tuple[Attributes, bool]] = {
    ("bloom", "BloomModel"): (_bloom, True),
    ("falcon", "FalconModel"): (_falcon, True),
    ("minimax", "MiniMaxModel"): (_minimax, False),
    ("roformer", "RoFormerEncoder"): (_roformer, False),
}


def known_bodies(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that need :func:`body_class` for a step over a tree, patched or not."""
    return [module for module in modules if transformers_name(original_class(module)) in _KNOWN]


@functools.cache
def body_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class that accepts steps over a tree; one subclass per original class."""
    attributes, by_mask = _KNOWN[transformers_name(original)]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        is_step = cache_among(args, kwargs) is not None and not (by_mask and (mask is None or mask.numel()))
        if not is_step:
            return original.forward(self, *args, **kwargs)  # looked up at each call, as in attention_class.py
        copy: nn.Module = object.__new__(original)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(attributes(self, kwargs))
        return original.forward(copy, *args, **kwargs)

    return subclass(original, body_class, {"forward": forward})
