"""Well-known masks, in a few lines each, as functions with FlexAttention's signature.

A tensor that is passed to a factory is captured, not copied: attention reads changes in place, and the tensor may be on
any device.  Windows, caps and biases that models' configs specify are in ``builtin``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from prefixkit.attention.variants.builtin import check_count, sliding_window
from prefixkit.attention.variants.transforms import Streaming
from prefixkit.attention.variants.variant import CAUSAL, Variant, variant

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal() -> Variant:
    """Each query sees its sequence up to itself."""
    return CAUSAL


@lru_cache(maxsize=1)
def full() -> Variant:
    """Each query sees its whole sequence, including later tokens."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx.new_ones((), dtype=torch.bool)

    return variant(mask_mod=mask_mod, name="full")


def prefix_lm(length: int | Tensor) -> Variant:
    """Tokens of a prefix see each other in both directions; later tokens are causal (Raffel et al. 2020, 3.2.1).

    Args:
        length: Number of tokens of the prefix: one number, or ``[sequences]`` integers of any type, which ``b``
            indexes.

    Raises:
        ValueError: ``length`` is neither a count nor such a tensor.
    """
    if not isinstance(length, Tensor):
        check_count("prefix_lm", "length", length)
        return _prefix_lm(length)
    _check_integers("prefix_lm", "length", length, (1,))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < length.to(q_idx.device)[b]) | (kv_idx <= q_idx)

    return variant(mask_mod=mask_mod, name=f"prefix_lm({len(length)} sequences)")


@lru_cache(maxsize=1024, typed=True)
def _prefix_lm(length: int) -> Variant:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < length) | (kv_idx <= q_idx)

    return variant(mask_mod=mask_mod, name=f"prefix_lm({length})")


def document(ids: Tensor, *, causal: bool = True) -> Variant:
    """Each query sees only the tokens of its own document, in packed texts.

    Args:
        ids: The document of each position: ``[positions]``, or ``[sequences, positions]``, indexed by ``b`` too;
            integers of any type.  Tokens of a document need not be consecutive.
        causal: Whether a query sees no later token of its document.

    Raises:
        ValueError: ``ids`` are not integers of one of these shapes.
    """
    _check_integers("document", "ids", ids, (1, 2))

    def same(b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        here = ids.to(q_idx.device)
        return here[q_idx] == here[kv_idx] if ids.ndim == 1 else here[b, q_idx] == here[b, kv_idx]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        shown = same(b, q_idx, kv_idx)
        return shown & (kv_idx <= q_idx) if causal else shown

    order = "" if causal else ", both ways"
    return variant(mask_mod=mask_mod, name=f"document({ids.shape[-1]} positions{order})")


@lru_cache(maxsize=1024, typed=True)
def dilated_window(size: int, dilation: int) -> Variant:
    """Each query sees ``size`` tokens, every ``dilation``-th back from itself (Longformer; Beltagy et al. 2020, 3.1).

    ValueError unless both are 1 or more.
    """
    check_count("dilated_window", "size", size)
    check_count("dilated_window", "dilation", dilation)
    reach = size * dilation

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < reach) & ((q_idx - kv_idx) % dilation == 0)

    return variant(mask_mod=mask_mod, name=f"dilated_window({size} x {dilation})")


@lru_cache(maxsize=1024, typed=True)
def streaming(sinks: int, window: int) -> Variant:
    """Each query sees the first ``sinks`` tokens and the last ``window``, itself included (StreamingLLM; Xiao et al.
    2024, 3.2).  Positions are those in the sequence, not in the cache; for these see :func:`streaming_llm`.

    ValueError unless ``sinks`` is 0 or more and ``window`` 1 or more.
    """
    check_count("streaming", "sinks", sinks, least=0)
    check_count("streaming", "window", window)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & ((kv_idx < sinks) | (q_idx - kv_idx < window))

    return variant(mask_mod=mask_mod, name=f"streaming({sinks} sinks, {window})")


@lru_cache(maxsize=1024, typed=True)
def streaming_llm(sinks: int = 4, window: int = 2048) -> Variant:
    """Each query sees the first ``sinks`` tokens and the last ``window``, itself included, at positions in the cache,
    as if the tokens between them did not exist (StreamingLLM; Xiao et al. 2024, 3.2).  Texts may be endless, and KV
    that no query sees any more is freed.

    Keys are cached rotated for their positions in the text.  Queries are rotated twice: for the window at their
    positions in the text, and for the sinks at their positions in the cache (Ye et al. 2025, 4.3).  In a patched model
    the rotation is measured.  When the op is called directly, the variant's ``query`` transform runs twice, and should
    rotate the queries.

    ValueError unless both are 1 or more.
    """
    check_count("streaming_llm", "sinks", sinks)
    check_count("streaming_llm", "window", window)
    name = f"streaming_llm({sinks} sinks, {window})"
    return replace(sliding_window(window), name=name, streaming=Streaming(sinks, window))


def draft_tree(parents: Sequence[int], context: int | Tensor) -> Variant:
    """Draft tokens after a causal context: each sees the context, its ancestors among the drafts, and itself.

    Speculative decoding verifies a tree of drafts at once in this way (SpecInfer; Miao et al. 2024, 4.2), with all
    drafts in one sequence.  The model must compute rotary embeddings from each draft's depth in the tree.

    Args:
        parents: ``[drafts]`` the index of each draft's parent, an earlier draft; -1 if the draft follows the context.
        context: Number of tokens before the first draft: one number, or ``[sequences]`` integers, indexed by
            ``b``, so that one variant serves all steps.

    Raises:
        ValueError: a parent is not an earlier draft; there are no drafts; or ``context`` is neither a count nor such
            a tensor.
    """
    for draft, parent in enumerate(parents):
        if isinstance(parent, bool) or not isinstance(parent, int) or not -1 <= parent < draft:
            raise ValueError(f"draft_tree: draft {draft}'s parent must be an earlier draft or -1, got {parent!r}")
    if not len(parents):
        raise ValueError("draft_tree: parents must name at least one draft, got none")
    if isinstance(context, Tensor):
        _check_integers("draft_tree", "context", context, (1,))
    else:
        check_count("draft_tree", "context", context, least=0)
    sees, last = torch.eye(len(parents), dtype=torch.bool, device="cpu"), len(parents) - 1
    for draft, parent in enumerate(parents):
        if parent >= 0:
            sees[draft] |= sees[parent]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first = context.to(q_idx.device)[b] if isinstance(context, Tensor) else context
        q, kv = ((idx - first).clamp(0, last) for idx in (q_idx, kv_idx))
        return (kv_idx <= q_idx) & ((kv_idx < first) | sees.to(q_idx.device)[q, kv])

    return variant(mask_mod=mask_mod, name=f"draft_tree({len(parents)} drafts)")


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """Make a mask that shows what ``mask_mod`` hides; torch has ``and_masks`` and ``or_masks``.

    TypeError unless ``mask_mod`` is a function; :func:`as_mask_mod` makes one from a variant.
    """
    if not callable(mask_mod):
        raise TypeError(f"not_mask: mask_mod must be a function, got {type(mask_mod).__name__}")

    def inverted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~mask_mod(b, h, q_idx, kv_idx)

    return inverted


def as_mask_mod(of: Variant) -> MaskMod:
    """Make one mask function from a variant, ``of``, with all of its masks and causality: for ``or_masks``,
    :func:`not_mask` and torch's ``create_block_mask``.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        shown = q_idx >= 0 if of.looks_ahead else kv_idx <= q_idx
        for mod in of.mask_mods:
            shown = shown & mod.function(b, h, q_idx, kv_idx)
        if of.streaming is not None:
            shown = shown | (kv_idx < of.streaming.sinks) & (kv_idx <= q_idx)
        return shown

    return mask_mod


def _check_integers(function: str, parameter: str, tensor: Tensor, dims: tuple[int, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{function}: {parameter} must be a tensor of integers, got {type(tensor).__name__}")
    if tensor.dtype == torch.bool or tensor.dtype.is_floating_point or tensor.is_complex():
        raise ValueError(f"{function}: {parameter} must hold integers, got {tensor.dtype}")
    if tensor.ndim not in dims or not tensor.numel():
        wanted = " or ".join(str(dim) for dim in dims)
        raise ValueError(
            f"{function}: {parameter} must have {wanted} dimensions and an element, got {list(tensor.shape)}"
        )
