"""Variants of attention that users give to the layers of a patched model.

A variant is stored as an attribute of its attention module.  What a layer caches depends on the variants of the layers
before it, so variants are part of a layer's kind, and calls share KV only between equal kinds.  Tensors and numbers
that a variant's functions capture count as weights, so that a change in place is noticed at the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from prefixkit.attention.rotation import Rotation
from prefixkit.attention.variants import Streaming, Variant, parts_of, register
from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.models.model_errors import UnsupportedVariant
from prefixkit.models.own_attention.known import own_code
from prefixkit.models.requirements import CACHE
from prefixkit.threads import set_within

log = logging.getLogger("prefixkit")

LAYER_VARIANT = "_prefixkit_variant"  # the attribute of patched attention modules with a variant

# What users pass: one variant for all attention layers, or per layer number a variant or None.
LayerVariants = Variant | Mapping[int, Variant | None] | Callable[[int], Variant | None]

_measuring: ContextVar[bool] = ContextVar("prefixkit_measuring", default=False)


def measuring() -> AbstractContextManager[None]:
    """In this block layers may run without a tree, and then without their variants: the model's own attention is
    measured.
    """
    return set_within(_measuring, True)


@contextmanager
def trial(model: nn.Module) -> Iterator[list[nn.Module]]:
    """In this block, calls measure the model: without a tree, eagerly and without gradients.  What some models store of
    a call for the next, their ``rope_deltas``, is restored afterwards.

    Yields:
        The modules that store it.
    """
    storing: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    before = [module.rope_deltas for module in storing]
    try:
        with measuring(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield storing
    finally:
        for module, deltas in zip(storing, before, strict=True):
            module.rope_deltas = deltas


def refuse_without_tree(module: nn.Module) -> None:
    """Raise UnsupportedVariant if an attention module with a variant is called without a tree, because it would run
    without its variant.
    """
    if not _measuring.get():
        raise UnsupportedVariant(
            f"{type(module).__name__} was called without a prefix tree, and its variant "
            f"{module.__dict__[LAYER_VARIANT].name!r} would be left out: call prefixkit.generate, a Session, "
            "model.generate() with patch(..., tree_cache='auto'), or the model with "
            f"{CACHE}=prefixkit.TreeCache(model); or take the variant away with prefixkit.patch(model)"
        )


def _check_asks_one(function: Callable[..., object]) -> None:
    """Raise TypeError unless ``function`` can be called with a layer's number alone, as a ``score_mod`` cannot."""
    try:
        signature(function).bind(0)
    except TypeError:
        raise TypeError(
            f"variant is a function of {', '.join(signature(function).parameters)}, not of a layer's number; a "
            "score_mod or mask_mod becomes a variant by prefixkit.variant(score_mod=..., mask_mod=...)"
        ) from None
    except ValueError:  # a function of C, which has no signature
        return


def chosen_variants(given: LayerVariants | None, numbers: Sequence[int]) -> dict[int, Variant]:
    """The variant of each layer that is to have one, by layer number.

    Args:
        given: See :func:`prefixkit.patch`.
        numbers: The numbers of the attention layers.

    Raises:
        TypeError: ``given`` is of another type, or gives a layer something that is no variant; or a function of a
            variant captures an object whose content cannot be compared.
        UnsupportedVariant: ``given`` names a layer that is no attention layer.
    """
    if given is None or isinstance(given, Variant):
        found: dict[int, object] = dict.fromkeys(numbers, given)
    elif isinstance(given, Mapping):
        found = dict(given)
    elif callable(given):
        _check_asks_one(given)
        found = {number: given(number) for number in numbers}
    else:
        raise TypeError(
            f"variant must be a prefixkit variant, a mapping or a function from layer numbers to variants, or None, "
            f"got {type(given).__name__} {given!r}"
        )
    if unknown := [number for number in found if number not in numbers]:
        raise UnsupportedVariant(
            f"variant names layer {unknown[0]!r}, and the model's attention layers are {_ranges(numbers)}; "
            "only these have scores"
        )
    chosen = dict[int, Variant]()
    for number, one in found.items():
        if one is None:
            continue
        if not isinstance(one, Variant):
            raise TypeError(
                f"variant gives layer {number} a {type(one).__name__} {one!r}; a score_mod or mask_mod becomes a "
                "variant by prefixkit.variant(score_mod=..., mask_mod=...)"
            )
        register(one)  # or TypeError
        chosen[number] = one
    return chosen


def with_variants(
    kinds: Sequence[LayerKind],
    numbers: Sequence[int],
    classes: Mapping[int, type],
    variants: Mapping[int, Variant],
    rotations: Callable[[], Sequence[Rotation | None]],
) -> tuple[LayerKind, ...]:
    """The kinds of attention layers that apply variants.

    Args:
        kinds: The kinds as measured.
        numbers: The numbers of the layers.
        classes: The classes of their attention modules without the patch, by layer number.
        variants: The variants, by layer number.
        rotations: Measures how position rotates the queries of each layer.

    Raises:
        UnsupportedVariant: a layer cannot apply its variant.
    """
    found = list[LayerKind]()
    for place, (number, kind) in enumerate(zip(numbers, kinds, strict=True)):
        if (variant := variants.get(number)) is None:
            found.append(kind)
            continue
        if (why := _obstacle(kind, classes[number], variant)) is not None:
            raise UnsupportedVariant(
                f"layer {number} ({classes[number].__name__}) cannot apply the variant {variant.name!r}: {why}; leave "
                "the layer out, with patch(model, variant={layer number: variant, ...})"
            )
        # No kernel that attends over latents without expanding them can change scores.
        rotation = None if variant.streaming is None else rotations()[place]
        found.append(replace(kind, variant=variant, absorbs=False, rotation=rotation))
    return tuple(found)


def _obstacle(kind: LayerKind, cls: type, variant: Variant) -> str | None:
    """Why a layer cannot apply a variant; None if it can."""
    own = own_code(cls)
    if variant.reads("b"):
        return "it reads b, and a model's sequences have no numbers"
    if own is not None and own.adapt is not None and variant.reads("h"):
        return "it reads h, and the layer's heads are attended with in another order than the model's"
    if kind.selects is not None:
        return "an indexer selects the tokens that its queries see, by scores of its own"
    if kind.compressed:
        return "it attends to compressed tokens too, which have no position"
    if variant.has_sinks:
        return "sinks are logits that a layer brings itself, and the variant has none to give"
    if own is not None and own.adapt is not None and variant.transforms:
        return "it transforms heads, and the layer's are attended with in another order than the model's"
    if (variant.transforms.key or variant.transforms.value) and (kind.expands or kind.reads is not None):
        what = "another layer caches" if kind.reads is not None else "is made of latents while attention runs"
        return f"it transforms keys or values as they are cached, and the layer attends to what {what}"
    return _obstacle_to_streaming(kind, own is not None, variant.streaming)


def _obstacle_to_streaming(kind: LayerKind, own_code: bool, streaming: Streaming | None) -> str | None:
    """Why a layer cannot attend at positions in the cache; None if it can, or does not have to."""
    if streaming is None:
        return None
    if kind.expands or kind.biased or own_code:
        return (
            "positions in the cache are for layers that attend to keys as they cache them, by transformers' interface"
        )
    if kind.temperature is not None:
        return "the layer scales its queries by their position in the text"
    if kind.visible.chunk is not None or (kind.visible.window or streaming.last + 1) <= streaming.last:
        return f"the layer sees less by itself ({kind.visible}) than {streaming.last + 1} tokens, sinks and window"
    return None


def same_variant(one: Variant | None, other: Variant | None) -> bool:
    """Whether two variants compute the same, even after a tensor that one of them captures changes in place."""
    if one is None or other is None or one is other:
        return one is other
    ours, theirs = parts_of(one), parts_of(other)
    if len(ours) != len(theirs):
        return False
    for mine, yours in zip(ours, theirs, strict=True):
        if mine is not yours and (isinstance(mine, Tensor) or isinstance(yours, Tensor) or mine != yours):
            return False
    return True


def set_variants(modules: Mapping[int, nn.Module], variants: Mapping[int, Variant]) -> bool:
    """Set the variants of attention modules, by layer number, and remove those of the others; returns whether any layer
    now computes something else.
    """
    changed = False
    for number, module in modules.items():
        before, now = module.__dict__.get(LAYER_VARIANT), variants.get(number)
        if same_variant(before, now):
            continue
        changed = True
        module.__dict__.pop(LAYER_VARIANT, None)
        if now is not None:
            module.__dict__[LAYER_VARIANT] = now
    return changed


def variants_text(variants: Mapping[int, Variant]) -> str:
    """Which layers apply which variants, in words, with digests of all that their functions capture."""
    by_key = dict[str, list[int]]()
    for number in sorted(variants):
        by_key.setdefault(f"{variants[number].name}#{variants[number].content()}", []).append(number)
    return ", ".join(f"{key} in layers {_ranges(numbers)}" for key, numbers in by_key.items())


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order, runs of them as "0 to 3"."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def refuse_changed(before: str, now: str) -> NoReturn:
    """Raise UnsupportedVariant for a cache whose KV was computed under other variants than the model applies now."""
    raise UnsupportedVariant(
        f"TreeCache: its KV was computed with {before or 'no variant'}, and the model now applies "
        f"{now or 'no variant'}; reset() the cache, or patch the model as it was"
    )
