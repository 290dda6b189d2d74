"""The contracts of ops of attention over trees of K and V (see ``library``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.attention.variants import lookup
from prefixkit.ops import arguments


def tree_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_positions: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    variant: str,
    sinks: Tensor | None = None,
    rotary_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``T`` queries over a tree, as planned.

    Args:
        q: ``[T, heads, head_dim]`` in the pages' dtype; in any where these hold e4m3.
        k_pages, v_pages: ``[pages, page_size, kv_heads, head_dim]``, as ``KVPool`` lays them out on the device; heads
            of v_pages may have another size, ``v_dim``; our kernels serve 192 with 128, on Hopper.
        q_positions: ``[T]`` int64.
        plan: ``Step.plan``, made by the device's planner: on our kernels the work and the tree in static buffers
            that a captured graph reads, on plain torch a handle.  Up to three more tensors may follow on our kernels,
            of which the first two may have no elements: ``[T]`` int64 numbers of the queries' sequences, where the
            variant reads ``b``; what ``classify_blocks`` returned; ``[T]`` int64 the last position that each query may
            see of its own node, where the variant looks ahead.
        scale: Factor on ``q . k``.
        variant: Key from ``register``.
        sinks: ``[heads]`` contiguous, in q's dtype, if the variant has sinks: logits that join the denominator.
        rotary_pages: ``[pages, page_size, 1, rotary]`` the last elements of every key, where all heads share them;
            ``head_dim`` of k_pages is then that of q less ``rotary``.

    Returns:
        ``out [T, heads, v_dim]`` in q's dtype, float32 where the variant is a part of one (``Variant.is_part``), and
        ``lse [T, heads]`` float32, natural logarithm.  Rows that see nothing are 0, and -inf or their sink.

    Raises:
        UnknownVariant: no variant is registered under this key.
    """
    of = lookup(variant)
    arguments.check_attention(q, k_pages, v_pages, q_positions, of, sinks, rotary_pages)
    dtype = torch.float32 if of.is_part else q.dtype
    return q.new_empty((*q.shape[:2], v_pages.shape[3]), dtype=dtype), q.new_empty(q.shape[:2], dtype=torch.float32)


# A plan's tensors where kernels run it: the work, whose second and third are items, then start, length, page_indptr,
# pages and first_slot of the tree's nodes.
_KERNEL_PLAN = 12
# Classes take 2 bits, 16 a word; blocks are of 16 tokens at least.  The words of all items take 16 MiB at most, and
# blocks that get none are compared; so do the bits of blocks, 64 for each query of a tile.
_BLOCK, _CLASSES, _MOST_WORDS, _TILE_ROWS = 16, 16, 1 << 22, 128


def class_shape(plan: Sequence[Tensor], page_size: int, gqa_group: int, rows: int, bits: bool) -> tuple[int, int]:
    """A row for each item of a plan for kernels, with words of classes for as many blocks as the tree's pages can hold
    and one more word; behind these rows counts, some for each of ``rows`` queries, and ``bits``.
    """
    tiles, pages, nodes = plan[1].shape[0], plan[10].shape[0], plan[7].shape[0]
    items, blocks = tiles + plan[2].shape[0], pages * -(-page_size // _BLOCK) + nodes
    words = max(1, min(-(-blocks // _CLASSES), _MOST_WORDS // max(1, items)))
    columns = -(-(words + 1) // 2) * 2  # 8 bytes
    most = min(tiles * words * _CLASSES * max(1, _TILE_ROWS // gqa_group) * 2, _MOST_WORDS) if bits else 0
    return items - (-(class_counts(rows) + most) // columns), columns


def class_counts(rows: int) -> int:
    """Words of counts behind the rows of a plan's items, of which there are some for each of ``rows`` queries."""
    return 4 + -(-rows // 2) * 2


def classify_blocks(
    q_positions: Tensor, plan: Sequence[Tensor], heads: Sequence[int], page_size: int, variant: str
) -> Tensor:
    """Which blocks of a plan's KV a variant's mask hides from all their queries, or shows to all.

    ``tree_attention`` with the result behind its plan reads no hidden blocks, and evaluates the mask in the others
    alone (FlexAttention, Dong et al. 2024, section 4.2: block sparsity).  It holds for these queries at these
    positions, in every layer of the variant.

    Args:
        q_positions, plan: As ``tree_attention`` takes them.
        heads: Query heads, KV heads, head sizes of Q and K, and of V.
        page_size: Tokens of a page.
        variant: Key from ``register``.

    Returns:
        ``[rows, words]`` int32 for ``tree_attention`` alone to read; without elements where nothing is to be known:
        plain torch, or a variant without a mask that was traced.

    Raises:
        UnknownVariant: no variant is registered under this key.
    """
    op = "classify_blocks"
    arguments.check_slots(op, "q_positions", q_positions, q_positions.device)
    if len(heads) != 4 or min(heads) < 1 or heads[0] % heads[1]:
        raise arguments.BadShape(
            f"{op}: heads must be query heads, KV heads, and head sizes of Q and K and of V, got {list(heads)}"
        )
    of = lookup(variant)
    if len(plan) < _KERNEL_PLAN or not of.mask_mods or not of.traced:
        return q_positions.new_empty((0, 0), dtype=torch.int32)
    bits = not of.reads("h", scores=False)
    shape = class_shape(plan, page_size, heads[0] // heads[1], len(q_positions), bits)
    return q_positions.new_empty(shape, dtype=torch.int32)


def plan_under_mask(
    plan: Sequence[Tensor], q_positions: Tensor, heads: Sequence[int], page_size: int, variant: str
) -> list[Tensor]:
    """A plan with what ``classify_blocks`` finds behind it; the plan itself where nothing is to be known."""
    classes = torch.ops.prefixkit.classify_blocks(q_positions, plan, heads, page_size, variant)
    if not classes.numel():
        return list(plan)
    sequences = plan[_KERNEL_PLAN] if len(plan) > _KERNEL_PLAN else q_positions.new_empty(0)
    return [*plan[:_KERNEL_PLAN], sequences, classes, *plan[_KERNEL_PLAN + 2 :]]
