"""Combining several variants into one."""

from __future__ import annotations

from functools import reduce

from prefixkit.attention.variants.mod import BadVariant
from prefixkit.attention.variants.transforms import Transforms
from prefixkit.attention.variants.variant import CAUSAL, Variant
from prefixkit.attention.visible import Visible


def compose(*variants: Variant) -> Variant:
    """Combine variants: ``score_mod``s apply in the order given, and a key is visible only if every mask shows it.

    The op takes one row of sinks, which are added once, even if several parts have sinks.  Keys after a query are
    visible if every part that hides keys looks ahead; CAUSAL and parts without a mask do not affect this.  A
    part that turns scores into weights, as ``sigmoid`` does, applies after all others.  Transforms apply one after the
    other.  With a streaming part, the ``score_mod``s of other parts see positions in the cache.

    Raises:
        BadVariant: one part has sinks and another does not normalise weights; a part hides keys, or does not normalise
            weights, together with a streaming part; or there are two streaming parts.
        TypeError: an argument is not a variant.
    """
    if others := [one for one in variants if not isinstance(one, Variant)]:
        raise TypeError(
            f"compose: variants must be Variants, one argument each, got {type(others[0]).__name__} {others[0]!r}; a "
            "score_mod or mask_mod becomes one by prefixkit.variant(score_mod=..., mask_mod=...)"
        )
    parts = sorted((part for part in variants if part is not CAUSAL), key=lambda part: part.sums)
    masks = [part for part in parts if part.mask_mods or part.looks_ahead]
    streaming = [part for part in parts if part.streaming is not None]
    alone = len(streaming) == 1 and not any(part.mask_mods or part.sums for part in parts if part is not streaming[0])
    if streaming and not alone:
        names = " and ".join(part.name for part in parts)
        raise BadVariant(
            "compose: a streaming variant moves positions together, so that others can neither hide keys by them nor "
            f"sum over parts: got {names}; leave the masks out"
        )
    if any(part.sums for part in parts) and any(part.has_sinks for part in parts):
        names = " and ".join(part.name for part in parts)
        raise BadVariant(f"compose: sinks join the sum that outputs are divided by, but there is none: got {names}")
    if len(parts) <= 1:
        return parts[0] if parts else CAUSAL
    return Variant(
        name=" + ".join(part.name for part in parts),
        score_mods=tuple(mod for part in parts for mod in part.score_mods),
        mask_mods=tuple(mod for part in parts for mod in part.mask_mods),
        window=min((part.window for part in parts if part.window is not None), default=None),
        # Together, chunks of several sizes may hide more than the smallest does: reading more than is seen is allowed.
        chunk=min((part.chunk for part in parts if part.chunk is not None), default=None),
        has_sinks=any(part.has_sinks for part in parts),
        looks_ahead=bool(masks) and all(part.looks_ahead for part in masks),
        approximate=any(part.approximate for part in parts),
        sums=any(part.sums for part in parts),
        serials=tuple(serial for part in parts for serial in part.serials),
        cut=reduce(Visible.within, (part.cut for part in parts)),
        transforms=sum((part.transforms for part in parts), Transforms()),
        streaming=streaming[0].streaming if streaming else None,
    )
