"""The variants that ops know, by their keys: op schemas know strings, but no Python functions."""

from __future__ import annotations

from weakref import WeakValueDictionary

from prefixkit.attention.variants.function_digest import fingerprint
from prefixkit.attention.variants.variant import CAUSAL, Variant

# Variants without captured tensors stay known, as there are few; variants that capture tensors are held weakly.
_known: dict[str, Variant] = {CAUSAL.name: CAUSAL}
_capturing: WeakValueDictionary[str, Variant] = WeakValueDictionary()


class UnknownVariant(ValueError):
    """An op was given a key that no variant is registered under."""


def register(variant: Variant) -> str:
    """Make a variant known to the ops, whose schemas know strings but no Python functions.

    Returns:
        The key: the name, and a digest of the functions' code, the numbers that they capture, window, chunk and other
        traits.  Variants without captured tensors that do the same have the same key, in every process, and stay known.
        A variant with captured tensors has a unique key, known as long as the variant exists.
    """
    if variant is CAUSAL:
        return variant.name
    numbers = [
        (mod.expression.code, mod.expression.scalars) if mod.expression is not None else mod.function
        for mod in variant.mods
    ]
    what = numbers, variant.traits, variant.transforms.by_rows, variant.serials
    key = f"{variant.name}#{fingerprint(*what)}"
    if variant.serials:
        _capturing[key] = variant
    else:
        _known.setdefault(key, variant)
    return key


def lookup(key: str) -> Variant:
    """The variant registered under a key, or UnknownVariant."""
    variant = _known.get(key) or _capturing.get(key)
    if variant is None:
        known = ", ".join(sorted([*_known, *_capturing]))
        raise UnknownVariant(
            f"no variant is registered as {key!r}; pass the key that register(variant) returned, and keep a variant "
            f"that captures tensors as long as it is in use ({known})"
        )
    return variant
