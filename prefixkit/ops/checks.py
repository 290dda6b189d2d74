"""What the ops demand of their arguments: shapes, dtypes, devices and strides.  Only checked mode reads data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.attention.capacity import scratch_ints
from prefixkit.attention.gpu_cost import COST_NUMBERS, SHARING_NUMBERS
from prefixkit.ops.sampling_records import MOST_VOCAB, RECORD_INTS, words

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# A plan packed for the GPU's kernels, as csrc/attention/plan.cuh describes it.
PACKED = ("counts", "tile_items", "decode_items", "segments", "merge_indptr", "merge_indices")
NODES = ("start", "length", "page_indptr", "pages", "first_slot")


class BadShape(ValueError):
    """A tensor's shape or strides do not fit the op or its other tensors."""


class BadDtype(TypeError):
    """A tensor's dtype is not the one that the op takes."""


class BadDevice(ValueError):
    """Tensors of one call lie on different devices."""


def _shape(op: str, name: str, tensor: Tensor, expected: object, fits: bool) -> None:
    if not fits:
        raise BadShape(f"{op}: {name} must have shape {expected}, got {list(tensor.shape)}")


def _dtype(op: str, name: str, tensor: Tensor, expected: Sequence[torch.dtype], why: str = "") -> None:
    if tensor.dtype not in expected:
        wanted = " or ".join(str(dtype) for dtype in expected)
        raise BadDtype(f"{op}: {name} must be {wanted}{why}, got {tensor.dtype}; convert it with .to()")


def _device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise BadDevice(f"{op}: {name} is on {tensor.device}, but the first tensor is on {device}; move it with .to()")


def check_pages(op: str, k_pages: Tensor, v_pages: Tensor) -> None:
    """K and V of one layer: alike, ``[pages, page_size, kv_heads, head_dim]``, with a head's elements adjacent."""
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        _shape(op, name, pages, "[pages, page_size, kv_heads, head_dim]", pages.ndim == 4)
        _dtype(op, name, pages, FLOATS)
        if pages.stride(3) != 1:
            raise BadShape(f"{op}: {name} must have stride 1 over head_dim, got strides {list(pages.stride())}")
    _shape(op, "v_pages", v_pages, f"{list(k_pages.shape)} like k_pages", v_pages.shape == k_pages.shape)
    _dtype(op, "v_pages", v_pages, (k_pages.dtype,), " like k_pages")
    _device(op, "v_pages", v_pages, k_pages.device)


def check_slots(op: str, name: str, slots: Tensor, device: torch.device) -> None:
    """``[N]`` int64."""
    _shape(op, name, slots, "[N]", slots.ndim == 1)
    _dtype(op, name, slots, (torch.int64,))
    _device(op, name, slots, device)


def check_append(
    key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, op: str = "kv_append"
) -> None:
    """Arguments of ``kv_append``."""
    check_pages(op, k_pages, v_pages)
    check_slots(op, "slots", slots, k_pages.device)
    tokens, (_, _, kv_heads, head_dim) = slots.shape[0], k_pages.shape
    for name, tensor in (("key", key), ("value", value)):
        expected = f"[{tokens}, {kv_heads}, {head_dim}] (slots, then kv_heads and head_dim of the pages)"
        _shape(op, name, tensor, expected, tensor.shape == (tokens, kv_heads, head_dim))
        _dtype(op, name, tensor, (k_pages.dtype,), " like the pages")
        _device(op, name, tensor, k_pages.device)


def check_rotary(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> None:
    """Arguments of ``rotary_append``."""
    op = "rotary_append"
    check_append(key, value, k_pages, v_pages, slots, op)
    tokens, head_dim = slots.shape[0], k_pages.shape[3]
    if head_dim % 2:
        raise BadShape(f"{op}: halves of a head turn against each other, but head_dim is {head_dim}")
    fits = q.ndim == 3 and q.shape[0] == tokens and q.shape[2] == head_dim
    _shape(op, "q", q, f"[{tokens}, heads, {head_dim}] (slots, then head_dim of the pages)", fits)
    for name, tensor in (("cos", cos), ("sin", sin)):
        _shape(op, name, tensor, f"[{tokens}, {head_dim}]", tensor.shape == (tokens, head_dim))
    for name, tensor in (("q", q), ("cos", cos), ("sin", sin)):
        _dtype(op, name, tensor, (k_pages.dtype,), " like the pages")
        _device(op, name, tensor, k_pages.device)


def check_advance(leaf: Tensor, nodes: Sequence[Tensor], step: Sequence[Tensor], rows: int) -> None:
    """Arguments of ``advance``: ``nodes`` are the tree, ``step`` is sampled, tokens, positions and slots."""
    op, names = "advance", ("sampled", "tokens", "positions", "slots")
    _nodes(op, nodes, leaf.device)
    for name, tensor in zip(names, step, strict=True):
        check_slots(op, name, tensor, leaf.device)
    _dtype(op, "leaf", leaf, (torch.int32,))
    for name, tensor in zip(("leaf", *names), (leaf, *step), strict=True):
        _shape(op, name, tensor, f"[at least {rows}]", tensor.ndim == 1 and tensor.shape[0] >= rows)


def check_sample(logits: Tensor, records: Tensor, seen: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
    """Arguments of ``sample``."""
    op, device = "sample", logits.device
    fits = logits.ndim == 2 and 1 <= logits.shape[1] <= MOST_VOCAB
    _shape(op, "logits", logits, f"[n, vocab] with 1 to {MOST_VOCAB} tokens", fits)
    _dtype(op, "logits", logits, FLOATS)
    rows, vocab = logits.shape
    if vocab > 1 and logits.stride(1) != 1:
        strides = list(logits.stride())
        raise BadShape(f"{op}: logits must have stride 1 over the vocabulary, got strides {strides}; use .contiguous()")
    for name, tensor, dtype, width in (
        ("records", records, torch.int32, (RECORD_INTS,)),
        ("seen", seen, torch.int32, (words(vocab),)),
        ("tokens", tokens, torch.int64, ()),
        ("logprobs", logprobs, torch.float32, ()),
    ):
        shape = tensor.shape
        if len(shape) != 1 + len(width) or shape[0] < rows or shape[1:] != width or not tensor.is_contiguous():
            expected = f"[at least {rows}{''.join(f', {n}' for n in width)}], contiguous"
            _shape(op, name, tensor, expected, False)
        if tensor.dtype != dtype or tensor.device != device:
            _dtype(op, name, tensor, (dtype,))
            _device(op, name, tensor, device)


def check_plan_tree(
    tree: Sequence[Tensor], work: Sequence[Tensor], scratch: Tensor, heads: Sequence[int], cost: Sequence[float]
) -> None:
    """Arguments of ``plan_tree``."""
    op, device = "plan_tree", tree[1].device
    _group(op, "tree", ("num_nodes", "parent", "subtree_end", "length", "own"), tree, device)
    _group(op, "work", PACKED, work, device)
    _group(op, "scratch", ("scratch",), (scratch,), device)
    nodes = tree[1].shape[0]
    _shape(op, "num_nodes", tree[0], "[1]", tree[0].shape == (1,))
    for name, tensor in zip(("parent", "subtree_end", "length", "own"), tree[1:], strict=True):
        if tensor.shape != (nodes,) or not tensor.is_contiguous():
            _shape(op, name, tensor, f"[{nodes}], contiguous", False)
    _work_shapes(op, work)
    if not all(tensor.is_contiguous() for tensor in (*work, scratch)):
        raise BadShape(f"{op}: the plan's tensors and scratch must be contiguous")
    need = scratch_ints(nodes, work[1].shape[0], work[2].shape[0], work[4].shape[0] - 1)
    if scratch.ndim != 1 or scratch.shape[0] < need:
        _shape(op, "scratch", scratch, f"[at least {need}]", False)
    if len(heads) != 4 or min(heads) < 1 or heads[0] % heads[1]:
        raise ValueError(
            f"{op}: heads must be query heads, KV heads, head size, bytes of an element, got {list(heads)}"
        )
    if len(cost) != COST_NUMBERS:
        raise ValueError(f"{op}: cost must be the {COST_NUMBERS} numbers of a GpuCost, got {len(cost)}")
    group, tile_heads = heads[0] // heads[1], int(cost[SHARING_NUMBERS - 1])
    if group > tile_heads:
        raise ValueError(f"{op}: a tile must hold a GQA group of {group} heads, but holds {tile_heads}; plan in numpy")


def check_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, q_positions: Tensor) -> None:
    """Arguments of ``tree_attention`` that differ from layer to layer; :func:`check_work` has the others."""
    op = "tree_attention"
    check_pages(op, k_pages, v_pages)
    kv_heads, head_dim = k_pages.shape[2:]
    _shape(op, "q", q, f"[T, heads, {head_dim}] (head_dim of the pages)", q.ndim == 3 and q.shape[2] == head_dim)
    _dtype(op, "q", q, (k_pages.dtype,), " like the pages")
    _device(op, "q", q, k_pages.device)
    if q.shape[1] < 1 or q.shape[1] % kv_heads:
        raise BadShape(f"{op}: q has {q.shape[1]} heads, which must be a multiple of the pages' {kv_heads} KV heads")
    check_positions(q, q_positions)


def check_positions(q: Tensor, q_positions: Tensor) -> None:
    """``q_positions`` of ``tree_attention``: one for each row of q."""
    op = "tree_attention"
    check_slots(op, "q_positions", q_positions, q.device)
    _shape(op, "q_positions", q_positions, f"[{q.shape[0]}] (rows of q)", q_positions.shape[0] == q.shape[0])


def check_packed(rows: int, work: Sequence[Tensor], nodes: Sequence[Tensor]) -> None:
    """The same for a plan as the GPU's kernels take it; buffers may be larger than what they hold."""
    op = "tree_attention"
    _group(op, "work", PACKED, work)
    _work_shapes(op, work)
    _shape(op, "work.merge_indptr", work[4], f"[{rows} + 1] or more (rows of q)", work[4].shape[0] > rows)
    _nodes(op, nodes, work[0].device)


def _work_shapes(op: str, work: Sequence[Tensor]) -> None:
    counts, tile_items, decode_items, segments, merge_indptr, merge_indices = work
    _shape(op, "work.counts", counts, "[8]", counts.shape == (8,))
    _shape(op, "work.tile_items", tile_items, "[items, 8]", tile_items.ndim == 2 and tile_items.shape[1] == 8)
    _shape(op, "work.decode_items", decode_items, "[items, 8]", decode_items.ndim == 2 and decode_items.shape[1] == 8)
    _shape(op, "work.segments", segments, "[segments, 3]", segments.ndim == 2 and segments.shape[1] == 3)
    _shape(op, "work.merge_indptr", merge_indptr, "[rows + 1]", merge_indptr.ndim == 1 and merge_indptr.shape[0] > 0)
    _shape(op, "work.merge_indices", merge_indices, "[partial rows]", merge_indices.ndim == 1)


def _group(
    op: str, group: str, names: Sequence[str], tensors: Sequence[Tensor], device: torch.device | None = None
) -> None:
    if len(tensors) != len(names):
        raise BadShape(f"{op}: {group} must be the {len(names)} tensors {', '.join(names)}, got {len(tensors)}")
    device = device or tensors[0].device
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != torch.int32 or tensor.device != device:  # names are for errors only
            _dtype(op, f"{group}.{name}", tensor, (torch.int32,))
            _device(op, f"{group}.{name}", tensor, device)


def _nodes(op: str, nodes: Sequence[Tensor], device: torch.device) -> None:
    _group(op, "nodes", NODES, nodes, device)
    start, length, page_indptr, _, first_slot = nodes
    for name, tensor, extra in (("length", length, 0), ("page_indptr", page_indptr, 1), ("first_slot", first_slot, 0)):
        expected = f"[{start.shape[0] + extra}] ({start.shape[0]} nodes)"
        _shape(op, f"nodes.{name}", tensor, expected, tensor.shape[0] == start.shape[0] + extra)


def check_append_slots(op: str, slots: Tensor, pages: Tensor) -> None:
    """IndexError: a slot neither exists nor is -1, which writes nothing.  ValueError: one is written twice."""
    if capturing(slots) or not len(slots := slots[slots != -1]):
        return
    low, high, num_slots = int(slots.min()), int(slots.max()), pages.shape[0] * pages.shape[1]
    if low < 0 or high >= num_slots:
        raise IndexError(f"{op}: slots must be 0..{num_slots - 1}, got {low}..{high}")
    if len(torch.unique(slots)) < len(slots):
        raise ValueError(f"{op}: slots must be distinct, for two tokens cannot share a slot")


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph captures what is done with this tensor."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
