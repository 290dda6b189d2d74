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
        q: ``[T, heads, head_dim]`` in the pages' dtype, or in any dtype if the pages hold e4m3.
        k_pages, v_pages: ``[pages, page_size, kv_heads, head_dim]``, as ``KVPool`` lays them out on the device.  Heads
            of v_pages may have another size, ``v_dim``; our kernels support 192 with 128, on Hopper.
        q_positions: ``[T]`` int64.
        plan: ``Step.plan``, made by the device's planner: for our kernels the tensors of the work and of the tree,
            static buffers if a captured graph reads them; for plain torch a handle.  For our kernels up to three more
            tensors may follow, the first two perhaps without elements: ``[T]`` int64 the number of each query's
            sequence, if the variant reads ``b``; the result of ``classify_blocks``; ``[T]`` int64 the last position of
            its own node that each query may see, if the variant looks ahead.
        scale: Factor on ``q . k``.
        variant: Key from ``register``.
        sinks: ``[heads]`` contiguous, in q's dtype, if the variant has sinks: logits that join the denominator.
        rotary_pages: ``[pages, page_size, 1, rotary]`` the last elements of every key, if all heads share them; the
            ``head_dim`` of k_pages is then that of q minus ``rotary``.

    Returns:
        ``out [T, heads, v_dim]`` in q's dtype, or in float32 if the variant is a part of one (``Variant.is_part``),
        and ``lse [T, heads]`` float32, natural logarithm.  For a row that sees no key ``out`` is 0, and ``lse`` is -inf
        or the head's sink.

    Raises:
        UnknownVariant: no variant is registered under this key.
    """
    of = lookup(variant)
    arguments.check_attention(q, k_pages, v_pages, q_positions, of, sinks, rotary_pages)
    dtype = torch.float32 if of.is_part else q.dtype
    return q.new_empty((*q.shape[:2], v_pages.shape[3]), dtype=dtype), q.new_empty(q.shape[:2], dtype=torch.float32)


# The number of tensors in a plan for our kernels: the work, whose second and third tensors are items, then start,
# length, page_indptr, pages and first_slot of the tree's nodes.
_KERNEL_PLAN = 12
# A class takes 2 bits, so a word holds 16; a block has at least 16 tokens.  The words of all items take at most 16 MiB:
# in blocks without a class the mask is evaluated.  The bits of blocks, 64 for each query of a tile, take at most 16 MiB
# too.
_BLOCK, _CLASSES, _MOST_WORDS, _TILE_ROWS = 16, 16, 1 << 22, 128


def class_shape(plan: Sequence[Tensor], page_size: int, gqa_group: int, rows: int, bits: bool) -> tuple[int, int]:
    """The shape ``(rows, words)`` of the result of ``classify_blocks``.

    Each item of the plan has a row: words of classes for as many blocks as the tree's pages can hold, and one more
    word.  The rows that follow hold counts, some of them for each of ``rows`` queries, and the blocks' ``bits``.
    """
    tiles, pages, nodes = plan[1].shape[0], plan[10].shape[0], plan[7].shape[0]
    items, blocks = tiles + plan[2].shape[0], pages * -(-page_size // _BLOCK) + nodes
    words = max(1, min(-(-blocks // _CLASSES), _MOST_WORDS // max(1, items)))
    columns = -(-(words + 1) // 2) * 2  # 8 bytes
    most = min(tiles * words * _CLASSES * max(1, _TILE_ROWS // gqa_group) * 2, _MOST_WORDS) if bits else 0
    return items - (-(class_counts(rows) + most) // columns), columns


def class_counts(rows: int) -> int:
    """The number of words of counts after the rows of a plan's items, some of them for each of ``rows`` queries."""
    return 4 + -(-rows // 2) * 2


def classify_blocks(
    q_positions: Tensor, plan: Sequence[Tensor], heads: Sequence[int], page_size: int, variant: str
) -> Tensor:
    """Classify blocks of a plan's KV: the variant's mask hides one from all its queries, shows it to all, or cuts it.

    With the result appended to its plan, ``tree_attention`` does not read hidden blocks, and evaluates the mask only in
    blocks that it cuts (FlexAttention, Dong et al. 2024, section 4.2: block sparsity).  The result is valid for these
    queries at these positions, in every layer with the variant.

    Args:
        q_positions, plan: As ``tree_attention`` takes them.
        heads: Query heads, KV heads, head sizes of Q and K, and of V.
        page_size: Tokens of a page.
        variant: Key from ``register``.

    Returns:
        ``[rows, words]`` int32 that only ``tree_attention`` reads; without elements where nothing is classified: for a
        plan for plain torch, or a variant without a mask that was traced.

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
    """A plan followed by the result of ``classify_blocks``; the plan itself if nothing is classified."""
    classes = torch.ops.prefixkit.classify_blocks(q_positions, plan, heads, page_size, variant)
    if not classes.numel():
        return list(plan)
    sequences = plan[_KERNEL_PLAN] if len(plan) > _KERNEL_PLAN else q_positions.new_empty(0)
    return [*plan[:_KERNEL_PLAN], sequences, classes, *plan[_KERNEL_PLAN + 2 :]]
