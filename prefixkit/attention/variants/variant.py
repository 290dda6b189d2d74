"""Variants of attention: what happens to a score between ``q . k`` and the softmax, written once, in Python.

Functions have FlexAttention's signatures (Dong et al. 2024): elementwise, over 0-d tensors.

    score_mod(score, b, h, q_idx, kv_idx) -> score     # score = scale * q . k
    mask_mod(b, h, q_idx, kv_idx) -> bool              # True: visible

``q_idx`` and ``kv_idx`` are positions in the sequence, ``h`` is the query head, ``b`` the number that the caller gave
the sequence.  Each function is traced into one expression: kernels are generated from it, and the CPU evaluates it for
whole blocks.  The float64 oracle (``attention.reference``) calls the function itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from prefixkit.attention.variants.expression import Captured, Expression
from prefixkit.attention.variants.function_digest import captured, fingerprint
from prefixkit.attention.variants.mod import BadVariant, Mod, check_arguments, mod_of, name_of
from prefixkit.attention.variants.tracing.trace import MASK_MOD, SCORE_MOD
from prefixkit.attention.variants.transforms import Streaming, Transform, Transforms
from prefixkit.attention.variants.visibility import by_distance, mask_bounds, without_causality
from prefixkit.attention.visible import ALL, Visible


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant of attention; made by :func:`variant`, by the functions of the gallery, and by :func:`compose`.

    Attributes:
        name: The name in logs and error messages, and the readable half of the key.
        score_mods: Functions that change scores, one after the other.
        mask_mods: Masks; a key is visible if all of them show it.
        window, chunk: Sizes in tokens of a window or chunk outside which a query sees no key, so that no KV outside is
            read; masks hide further keys inside.  None if no bound is known.
        has_sinks: Whether the op takes a logit per head that joins the softmax's denominator without a value.
        looks_ahead: Whether ``mask_mods`` may show keys after the query; if not, attention is causal in addition to
            them.
        approximate: Whether kernels use the hardware's tanh, also for sigmoid.
        sums: Whether outputs are sums of values weighted by the exponentials of scores, without normalisation.
        serials: Serial numbers of the variants that capture tensors, which distinguish variants with equal code.
        cut: Further bounds that plans apply to KV lists.
        transforms: Functions of whole rows, before and after attention.
        streaming: The sinks and the window, if queries attend to them at positions in the cache; ``mask_mods`` and
            ``window`` then apply to the window.
    """

    name: str
    score_mods: tuple[Mod, ...] = ()
    mask_mods: tuple[Mod, ...] = ()
    window: int | None = None
    chunk: int | None = None
    has_sinks: bool = False
    looks_ahead: bool = False
    approximate: bool = False
    sums: bool = False
    serials: tuple[int, ...] = ()
    cut: Visible = ALL
    transforms: Transforms = Transforms()
    streaming: Streaming | None = None

    def __repr__(self) -> str:
        return f"Variant({self.name!r})"

    @property
    def mods(self) -> tuple[Mod, ...]:
        """All functions: those that change scores, then those that hide keys."""
        return self.score_mods + self.mask_mods

    @cached_property
    def visible(self) -> Visible:
        """The range of keys that attention reads."""
        return Visible(self.window, self.chunk).within(self.cut)

    @property
    def traits(self) -> tuple[int | None, ...]:
        """Everything the variant does apart from its functions."""
        streaming = () if self.streaming is None else (self.streaming.sinks, self.streaming.window)
        flags = self.has_sinks, self.looks_ahead, self.approximate, self.sums
        return len(self.score_mods), self.window, self.chunk, *flags, *astuple(self.cut), *streaming

    @property
    def parts(self) -> tuple[Variant, ...]:
        """The variants that ops compute, without transforms: one; for a streaming variant, attention to the window and
        then attention to the sinks.  They live as long as this variant.
        """
        return self._parts if self.transforms or self.streaming is not None else (self,)

    @property
    def is_part(self) -> bool:
        """Whether the variant attends to some of the keys only: ops then return float32, which is rounded after it is
        merged with the attention to the other keys.
        """
        return self.cut != ALL

    @cached_property
    def _parts(self) -> tuple[Variant, ...]:
        if self.streaming is None:
            return (replace(self, transforms=Transforms()),)
        first, last = self.streaming.sinks, self.streaming.last
        scores = replace(self, transforms=Transforms(), streaming=None, cut=Visible(first=first))
        return scores, replace(scores, mask_mods=(), window=None, has_sinks=False, cut=Visible(until=first, last=last))

    @cached_property
    def traced(self) -> bool:
        """Whether kernels can be generated for the variant; else plain torch runs it."""
        return all(mod.expression is not None for mod in self.mods)

    @cached_property
    def biases(self) -> tuple[Expression, ...] | None:
        """The terms that the ``score_mods`` add to scores; None if one of them does anything else."""
        found = [None if mod.expression is None else mod.expression.bias for mod in self.score_mods]
        biases = tuple(bias for bias in found if bias is not None)
        return biases if len(biases) == len(found) else None

    @cached_property
    def by_distance(self) -> bool:
        """Whether the biases and masks depend on positions only by the distance from query to key; False without a
        bias.
        """
        masks = [mod.expression for mod in self.mask_mods]
        return bool(self.biases) and all(
            each is not None and not each.reads("b") and by_distance(each) for each in (*(self.biases or ()), *masks)
        )

    @cached_property
    def hides_by_position(self) -> bool:
        """Whether masks depend on positions and constants only, so that kernels can classify whole blocks."""
        masks = [mod.expression for mod in self.mask_mods]
        return all(each is not None and not (each.tensors or each.reads("b") or each.reads("h")) for each in masks)

    @cached_property
    def captured(self) -> tuple[Captured, ...]:
        """The tensors that the functions capture."""
        return tuple(each for mod in self.mods if mod.expression is not None for each in mod.expression.tensors)

    @property
    def versions(self) -> tuple[int, ...]:
        """How often each captured tensor was changed in place: results for other versions are out of date."""
        return versions_of(self.captured)

    def reads(self, argument: str, *, masks: bool = True, scores: bool = True) -> bool:
        """Whether a result depends on ``argument``, one of :data:`ARGUMENTS`; untraced functions may read all but
        "b", whose use is known.

        Args:
            argument: "b", "h", "q_idx" or "kv_idx".
            masks, scores: Whether functions that hide keys, and those that change scores, count.
        """
        mods = (self.mask_mods if masks else ()) + (self.score_mods if scores else ())
        return any(mod.reads(argument) for mod in mods)

    def change(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Apply the ``score_mods`` to scores.

        Args:
            score: ``[...]`` float scores.
            b, h, q_idx, kv_idx: ``[...]`` integers that broadcast against ``score``: sequence, query head, and the
                positions of query and key.

        Returns:
            ``[...]`` new scores.
        """
        for mod in self.score_mods:
            score = mod(score=score, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
        return score

    def shows(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Apply the ``mask_mods``: ``[...]`` bool, True where all show the key; broadcasts against the arguments.

        Args:
            b, h, q_idx, kv_idx: ``[...]`` integers: sequence, query head, and the positions of query and key.
        """
        shown: Tensor | None = None
        for mod in self.mask_mods:
            each = mod(b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
            shown = each if shown is None else shown & each
        return torch.ones((), dtype=torch.bool, device=q_idx.device) if shown is None else shown

    @cached_property
    def fewest_heads(self) -> int | None:
        """The smallest dimension of captured tensors that ``h`` indexes; None if ``h`` indexes none."""
        found = (mod.expression.fewest_heads() for mod in self.mods if mod.expression is not None)
        return min((heads for heads in found if heads is not None), default=None)

    def content(self) -> str:
        """A digest of all the variant does, including the content of captured tensors; equal in every process."""
        parts = [_content(mod) for mod in self.mods]
        return fingerprint(parts, self.transforms.by_rows, *self.traits)


def versions_of(captured: Sequence[Captured]) -> tuple[int, ...]:
    """How often each tensor was changed in place; torch does not count changes of inference tensors: 0."""
    return tuple(0 if each.tensor.is_inference() else each.tensor._version for each in captured)


def _content(mod: Mod) -> tuple[object, ...]:
    if mod.expression is None:
        return ("function", mod.function)
    expression = mod.expression
    return (expression.code, expression.scalars, *(captured.tensor for captured in expression.tensors))


def parts_of(variant: Variant) -> list[object]:
    """What a variant consists of now, in a fixed order: code, numbers, and the tensors that its functions capture.

    Two variants with equal numbers and identical tensors do the same, also after such a tensor changes in place.
    """
    parts: list[object] = [variant.traits, *map(len, variant.transforms.by_rows)]
    for function in variant.transforms.functions:
        parts += captured(function)
    for mod in variant.mods:
        if mod.expression is None:
            parts += captured(mod.function)
        else:
            expression = mod.expression
            parts += [expression.code, *expression.scalars, *(each.tensor for each in expression.tensors)]
    return parts


CAUSAL = Variant("causal")
_serials = itertools.count()


def variant(
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    *,
    query: Transform | None = None,
    key: Transform | None = None,
    value: Transform | None = None,
    output: Transform | None = None,
    name: str | None = None,
    traced: bool = True,
    approximate: bool = False,
) -> Variant:
    """Make a variant from functions with FlexAttention's signatures (Dong et al. 2024), and from functions of whole
    rows (after FlashInfer's functors, Ye et al. 2025), which run in plain torch.

    Args:
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, or None.
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, or None for causal attention.  A mask is applied as written: one
            that shows tokens after the query makes attention look ahead.
        query, key, value, output: ``(x [rows, heads, head_dim], positions [rows]) -> x``, positions int64: queries
            before attention, keys and values once when they are appended, outputs when they are complete.  Any torch
            function is allowed.
        name: For logs and errors; the functions' names if None.
        traced: False runs the functions as they are, in plain torch, on a GPU too: for operations that the tracer does
            not know.  All KV is read then, as bounds of untraced masks are not known.
        approximate: True lets our kernels use the hardware's tanh for tanh and sigmoid, which has a relative error of
            up to 2^-11 and takes one instruction; CPUs and plain torch compute them exactly to rounding.

    Captured tensors are read in place when attention runs; captured numbers are read when the variant is made.

    Raises:
        BadVariant: no function is given; or one takes another number of arguments, or does not return a mask or score.
        UntraceableVariant: an operation is unknown, or the control flow depends on a value.
    """
    transforms = _transforms(query=query, key=key, value=value, output=output)
    if score_mod is None and mask_mod is None and not transforms:
        raise BadVariant("variant: got no function, no score_mod, mask_mod or transform; causal attention is CAUSAL")
    score_mods = () if score_mod is None else (mod_of("score_mod", score_mod, SCORE_MOD, traced),)
    mask_mods = () if mask_mod is None else (mod_of("mask_mod", mask_mod, MASK_MOD, traced),)
    functions = [function for function in (score_mod, mask_mod, *transforms.functions) if function is not None]
    made = Variant(name or " + ".join(map(name_of, functions)), score_mods, mask_mods)
    bounds = None
    if mask_mods and (mask := mask_mods[0].expression) is not None:
        bounds, rest = mask_bounds(mask), without_causality(mask)
        if bounds.causal:
            mask_mods = () if rest is None else (replace(mask_mods[0], expression=rest),)
    return Variant(
        made.name,
        score_mods,
        mask_mods,
        window=None if bounds is None else bounds.window,
        chunk=None if bounds is None else bounds.chunk,
        looks_ahead=mask_mod is not None and (bounds is None or not bounds.causal),
        approximate=approximate,
        serials=(next(_serials),) if made.captured or transforms or not traced else (),
        transforms=transforms,
    )


def _transforms(**given: Transform | None) -> Transforms:
    """The checked transforms of a variant; BadVariant if one does not take rows and positions."""
    for rows, function in given.items():
        if function is not None:
            check_arguments(f"{rows} transform", function, ("x", "positions"), "rows and their positions")
    return Transforms(**{rows: () if one is None else (one,) for rows, one in given.items()})
