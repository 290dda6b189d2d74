"""Masks from FlashInfer's BSR arrays and FlexAttention's BlockMask, which become tables of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from prefixkit.attention.variants.builtin import check_count
from prefixkit.attention.variants.tracing.trace import MASK_MOD, trace
from prefixkit.attention.variants.variant import Variant, variant
from prefixkit.attention.variants.visibility import mask_bounds

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# The values of a table's entries.
_HIDDEN, _SHOWN, _MASKED = 0, 1, 2


def block_mask(
    indptr: Tensor | Sequence[int],
    indices: Tensor | Sequence[int],
    q_block: int,
    kv_block: int,
    *,
    causal: bool = False,
) -> Variant:
    """Each block of queries sees the blocks of keys that BSR arrays list, as FlashInfer's
    ``BlockSparseAttentionWrapper`` takes them.

    Queries outside the arrays' blocks see no key, and no query sees keys outside these blocks.  The arrays are copied.

    Args:
        indptr: ``[blocks of queries + 1]`` integers: bounds in ``indices`` of the blocks of keys that each block sees.
        indices: ``[entries]`` integers: numbers of blocks of keys.
        q_block, kv_block: Tokens of a block of queries and of keys: FlashInfer's ``R`` and ``C``.
        causal: Whether queries see no later key.

    Raises:
        ValueError: the arrays are not BSR arrays, or a block size is below 1.
    """
    check_count("block_mask", "q_block", q_block)
    check_count("block_mask", "kv_block", kv_block)
    given = [torch.as_tensor(each).detach() for each in (indptr, indices)]
    if any(each.numel() and (each.is_floating_point() or each.is_complex()) for each in given):
        raise ValueError(f"block_mask: indptr and indices must be integers, got {given[0].dtype} and {given[1].dtype}")
    bounds, columns = (each.to("cpu", torch.int64) for each in given)
    if bounds.ndim != 1 or columns.ndim != 1 or len(bounds) < 2 or int(bounds[0]) != 0:
        raise ValueError(
            "block_mask: indptr and indices must have one dimension, and indptr begin with 0 and have an end for each "
            f"block of queries; got shapes {list(bounds.shape)} and {list(columns.shape)}"
        )
    if bool((bounds.diff() < 0).any()) or int(bounds[-1]) != len(columns):
        raise ValueError(f"block_mask: indptr must ascend to the {len(columns)} entries of indices, got {bounds}")
    if bool((columns < 0).any()):
        raise ValueError(f"block_mask: indices must be blocks of keys from 0 on, got {int(columns.min())}")
    rows = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    # One more row and column, which are hidden, for tokens outside the blocks.
    width = int(columns.max()) + 2 if len(columns) else 1
    table = torch.zeros(len(bounds), width, dtype=torch.bool, device="cpu")
    table[rows, columns] = True
    beyond_q, beyond_kv = len(bounds) - 1, width - 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at = (q_idx // q_block).clamp(max=beyond_q), (kv_idx // kv_block).clamp(max=beyond_kv)
        shown = table.to(q_idx.device)[at]
        return shown & (kv_idx <= q_idx) if causal else shown

    return variant(mask_mod=mask_mod, name=f"block_mask({len(columns)} blocks of {q_block} x {kv_block})")


def from_block_mask(block_mask: BlockMask) -> Variant:
    """Make a variant from FlexAttention's ``BlockMask``: full blocks of ``block_mask`` are visible, and its
    ``mask_mod`` decides in partial blocks.  The variant is causal if the mask provably is.  The arrays are copied.

    A dimension of one element serves all sequences, or all heads; larger dimensions are indexed by ``b`` and ``h``.

    Raises:
        TypeError: ``block_mask`` is not a ``BlockMask``.
        UntraceableVariant: its ``mask_mod`` cannot be traced.
    """
    if not all(hasattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE")):
        raise TypeError(f"from_block_mask: need a BlockMask, got {type(block_mask).__name__}")
    q_block, kv_block = block_mask.BLOCK_SIZE
    classes = _classes(block_mask, kv_block)
    # FlexAttention annotates its functions with the union of all accepted types.
    inner = cast(Callable[..., Tensor], block_mask.mask_mod)
    causal = mask_bounds(trace(inner, MASK_MOD)).causal and _shows_nothing_ahead(classes, q_block, kv_block)
    by_sequence, by_head, beyond_q, beyond_kv = (size - 1 for size in classes.shape)
    table = classes[(slice(None) if by_sequence else 0, slice(None) if by_head else 0)].contiguous()

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        of = (b,) * bool(by_sequence) + (h,) * bool(by_head)
        at = (q_idx // q_block).clamp(max=beyond_q), (kv_idx // kv_block).clamp(max=beyond_kv)
        found = table.to(q_idx.device)[(*of, *at)]
        shown = (found == _SHOWN) | ((found == _MASKED) & inner(b, h, q_idx, kv_idx))
        return (kv_idx <= q_idx) & shown if causal else shown

    name = getattr(inner, "__name__", "mask_mod")
    return variant(mask_mod=mask_mod, name=f"from_block_mask({name}, blocks of {q_block} x {kv_block})")


def _classes(block_mask: BlockMask, kv_block: int) -> Tensor:
    """``[sequences, heads, blocks of queries + 1, blocks of keys + 1]`` uint8; the last row and column are hidden."""
    listed = [(_MASKED, block_mask.kv_num_blocks, block_mask.kv_indices)]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        listed.append((_SHOWN, block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    *outer, q_blocks, _ = block_mask.kv_indices.shape
    outer = [1] * (2 - len(outer)) + outer
    highest = max(int(indices.max()) if indices.numel() else 0 for _, _, indices in listed)
    kv_blocks = max(-(-block_mask.seq_lengths[1] // kv_block), highest + 1)
    table = torch.zeros(*outer, q_blocks + 1, kv_blocks + 1, dtype=torch.uint8, device="cpu")
    for entry, counts, indices in listed:
        counts, indices = counts.cpu().long().view(*outer, q_blocks, 1), indices.cpu().long().view(*outer, q_blocks, -1)
        there = (torch.arange(indices.shape[3], device="cpu") < counts).nonzero(as_tuple=True)
        table[(*there[:3], indices[there])] = entry
    return table


def _shows_nothing_ahead(classes: Tensor, q_block: int, kv_block: int) -> bool:
    """Whether no fully visible block has a key after one of its queries."""
    q, kv = (torch.arange(size, device="cpu") for size in classes.shape[2:])
    ahead = (kv + 1) * kv_block - 1 > q[:, None] * q_block
    return not bool(((classes == _SHOWN) & ahead).any())
