"""The ops on a GPU in plain torch: for GPUs, installations and variants that our kernels do not serve.

Correct first.  The work list is cut into pieces of one simple mask (as on the CPU), pieces of like size are padded into one
block, and a block is two batched matrix products around a softmax in float32.  What a step needs is worked out once on the
host, where its numbers are compared with those of the last steps: that costs each layer one copy from the GPU and a wait, so
a CUDA graph cannot capture it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.state import State
from prefixkit.attention.variants import Variant, lookup
from prefixkit.backends.cuda.checks import check_append_slots, checked
from prefixkit.backends.torch.merge import Merge, plan_merge, run_merge
from prefixkit.backends.torch.pieces import DENSE, Array, Pieces, Work, cut, detach_long_runs, ranges
from prefixkit.ops.checks import WORK, BadShape, check_append, check_attention, check_packed, check_rotary, check_work
from prefixkit.ops.rotary import rotate

# Queries of a piece, and elements of one block's scores or keys: 256 MB of float32 scores.
TILE_ROWS = 512
BLOCK_ELEMENTS = 1 << 26
# Programs kept: a model uses one or two per step.
KEPT = 4


class NotCapturable(RuntimeError):
    """A CUDA graph was to capture an op that must read from the GPU."""


@dataclass(frozen=True, eq=False)
class Block:
    """``batch`` pieces of ``rows`` queries and ``length`` keys each, ragged ones padded with their last row or key.

    Attributes:
        row: ``[batch, rows]`` query rows.
        slot: ``[batch, length]`` slots of the keys.
        tokens: ``[batch]`` how many of them are real.
        q_position, kv_position: ``[batch, rows]`` and ``[batch, length]`` positions.
        causal: A query sees keys at its own position or before; else it sees all.
        padded: Some piece has fewer keys than ``length``.
    """

    row: Tensor
    slot: Tensor
    tokens: Tensor
    q_position: Tensor
    kv_position: Tensor
    causal: bool
    padded: bool


@dataclass(frozen=True, eq=False)
class Program:
    """One layer of a step: blocks, whose rows laid end to end ``merge`` brings to the query rows."""

    blocks: tuple[Block, ...]
    merge: Merge


_kept: list[tuple[tuple[object, ...], bytes, Program]] = []
_lock = threading.Lock()


@torch.no_grad()
def kv_append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """``kv_append``."""
    check_append(key, value, k_pages, v_pages, slots)
    _append("kv_append", key, value, k_pages, v_pages, slots)


@torch.no_grad()
def rotary_append(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Tensor:
    """``rotary_append``."""
    check_rotary(q, key, value, cos, sin, k_pages, v_pages, slots)
    _append("rotary_append", rotate(key, cos, sin), value, k_pages, v_pages, slots)
    return rotate(q, cos, sin)


def _append(op: str, key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write rows to their slots; the host does not wait to learn which rows have one."""
    tokens, page_size = slots.shape[0], k_pages.shape[1]
    num_slots = k_pages.shape[0] * page_size
    if checked():
        check_append_slots(op, slots, k_pages)
    if not tokens or not num_slots:
        return
    there = (slots >= 0) & (slots < num_slots)
    # A row that is to write nothing repeats what some row writes; where none writes, all put back what slot 0 holds.
    some = there.to(torch.uint8).argmax(dim=0, keepdim=True)
    writes = there.index_select(0, some)
    row = torch.where(there, torch.arange(tokens, device=slots.device), some)
    slot = torch.where(writes, slots[row], 0)
    where = (slot // page_size, slot % page_size)
    for pages, rows in ((k_pages, key), (v_pages, value)):
        pages.index_put_(where, torch.where(writes[:, None, None], rows[row], pages[0, 0]))


@torch.no_grad()
def tree_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_positions: Tensor,
    work: Sequence[Tensor],
    nodes: Sequence[Tensor],
    scale: float,
    key: str,
) -> tuple[Tensor, Tensor]:
    """``tree_attention`` on any device that torch knows."""
    check_attention(q, k_pages, v_pages, q_positions)
    variant = lookup(key)
    rows, heads, _ = q.shape
    if variant.sinks is not None and len(variant.sinks) != heads:
        raise BadShape(f"tree_attention: variant {variant.name!r} has {len(variant.sinks)} sinks for {heads} heads")
    program = _program_for(q_positions, work, nodes, k_pages.shape, heads, key, variant)
    states = [_attend(block, q, k_pages, v_pages, scale, variant) for block in program.blocks]
    if states:
        joined = State(torch.cat([s.out for s in states]), torch.cat([s.lse for s in states]))
        state = run_merge(program.merge, [joined], may_be_empty=True)
        out, lse = state.out, state.lse
    else:
        out, lse = q.new_zeros(q.shape, dtype=torch.float32), q.new_full((rows, heads), -math.inf, dtype=torch.float32)
    if variant.sinks is not None:
        sinks = variant.sinks.to(lse)
        out, lse = out * torch.sigmoid(lse - sinks).unsqueeze(-1), torch.logaddexp(lse, sinks)
    return out.to(q.dtype), lse


def _attend(block: Block, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, variant: Variant) -> State:
    """One block: ``[batch * rows, heads, head_dim]``; a row that sees nothing comes out empty."""
    batch, rows = block.row.shape
    _, page_size, kv_heads, head_dim = k_pages.shape
    heads, length = q.shape[1], block.slot.shape[1]
    number = torch.arange(heads, device=q.device)[:, None, None]
    group = heads // kv_heads
    head = torch.arange(kv_heads, device=q.device)[None, :, None]
    where = (block.slot[:, None] // page_size, head, block.slot[:, None] % page_size)
    k, v = (pages.transpose(1, 2)[where].view(-1, length, head_dim) for pages in (k_pages, v_pages))
    mine = q[block.row].view(batch, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    score = _product(mine.reshape(batch * kv_heads, group * rows, head_dim), k.transpose(1, 2))
    score = score.mul_(scale).view(batch, heads, rows, length)
    q_position, kv_position = block.q_position[:, None, :, None], block.kv_position[:, None, None, :]
    if variant.score_mod is not None:
        score = variant.score_mod(score, q_position, kv_position, number).to(torch.float32)
    hidden = kv_position > q_position if block.causal else None
    if variant.mask_mod is not None:
        masked = ~variant.mask_mod(q_position, kv_position, number)
        hidden = masked if hidden is None else hidden | masked
    if block.padded:
        beyond = (torch.arange(length, device=q.device) >= block.tokens[:, None])[:, None, None]
        hidden = beyond if hidden is None else hidden | beyond
    if hidden is not None:
        score = score.masked_fill(hidden, -math.inf)
    top = score.amax(dim=-1, keepdim=True)
    top = top.masked_fill_(top == -math.inf, 0.0)
    weight = torch.exp(score - top)
    total = weight.sum(dim=-1, keepdim=True)
    out = _product(weight.to(v.dtype).view(batch * kv_heads, group * rows, length), v)
    out = out.view(batch, heads, rows, head_dim) / total.masked_fill(total == 0, 1.0)
    lse = (top + total.log()).squeeze(-1)
    return State(
        out.transpose(1, 2).reshape(batch * rows, heads, head_dim), lse.transpose(1, 2).reshape(batch * rows, heads)
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32, whatever they are."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b, out_dtype=torch.float32)


def _to_host(op: str, tensors: Sequence[Tensor]) -> list[Array]:
    """Integers to numpy, in one copy."""
    device = tensors[0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotCapturable(
            f"{op}: the torch backend reads its plan on the host, which a CUDA graph cannot capture; run eagerly, or use "
            f"the CUDA kernels (`prefixkit env` says why they are not in use)"
        )
    flat = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(tuple(tensor.shape)) for part, tensor in zip(parts, tensors, strict=True)]


def _program_for(
    q_positions: Tensor,
    work: Sequence[Tensor],
    nodes: Sequence[Tensor],
    pool_shape: Sequence[int],
    heads: int,
    key: str,
    variant: Variant,
) -> Program:
    (check_work if len(work) == len(WORK) else check_packed)(len(q_positions), work, nodes)
    arrays = _to_host("tree_attention", [*work, *nodes, q_positions])
    shape = (tuple(pool_shape), heads, key, q_positions.device, tuple(array.shape for array in arrays))
    numbers = b"".join(array.tobytes() for array in arrays)
    with _lock:
        for entry in _kept:
            if entry[1] == numbers and entry[0] == shape:
                return entry[2]
    if len(work) != len(WORK):
        arrays = [*_unpacked(arrays[:6], len(q_positions)), *arrays[6:]]
    program = _compile(Work(pool_shape[1], *arrays), pool_shape, heads, variant, q_positions.device)
    with _lock:
        _kept.insert(0, (shape, numbers, program))
        del _kept[KEPT:]
    return program


def _unpacked(work: Sequence[Array], rows: int) -> list[Array]:
    """A plan packed for the kernels as the five arrays of a ``Plan``."""
    counts, wide, narrow, segments, merge_indptr, merge_indices = work
    packed = np.concatenate((wide[: counts[0]], narrow[: counts[1]]))
    count = packed[:, 4] >> 1
    items = np.column_stack((packed[:, :2], packed[:, 4] & 1, packed[:, 2]))
    indptr = np.concatenate(([0], np.cumsum(count)))
    bounds = merge_indptr[: rows + 1]
    return [items, indptr, segments[ranges(packed[:, 3], count)], bounds, merge_indices[: bounds[-1]]]


def _compile(work: Work, pool_shape: Sequence[int], heads: int, variant: Variant, device: torch.device) -> Program:
    pieces = cut(work, variant.reach, TILE_ROWS)
    low, high = pieces.slot.min(initial=0), (pieces.slot + pieces.count).max(initial=0)
    if low < 0 or high > pool_shape[0] * pool_shape[1]:
        raise IndexError(
            f"tree_attention: nodes name slots {low}..{high - 1}, but the pages hold slots 0.."
            f"{pool_shape[0] * pool_shape[1] - 1}"
        )
    elements = np.maximum(heads * pieces.rows, pool_shape[2] * pool_shape[3])
    pieces = detach_long_runs(pieces, np.iinfo(np.int64).max, np.maximum(1, BLOCK_ELEMENTS // elements))
    blocks, rows, base = [], [], []
    height = 0
    for batch in _batches(pieces, heads, pool_shape[2] * pool_shape[3]):
        block, most = _block(pieces, batch, work.q_positions, device)
        blocks.append(block)
        count = pieces.rows[batch]
        rows.append(ranges(pieces.row[batch], count))
        base.append(ranges(height + np.arange(len(batch)) * most, count))
        height += len(batch) * most
    row = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    index = np.concatenate(base) if base else np.zeros(0, dtype=np.int64)
    merge = plan_merge(len(work.q_positions), row, np.zeros_like(row), index, np.array([height]))
    return Program(tuple(blocks), _moved(merge, device))


def _batches(pieces: Pieces, heads: int, kv_elements: int) -> Iterator[Array]:
    """Pieces that share a block: of one kind, and of the same sizes up to the next power of two."""
    rows, tokens = (_power(sizes) for sizes in (pieces.rows, pieces.tokens))
    dense = pieces.kind == DENSE
    _, bucket = np.unique(np.stack((dense, rows, tokens)), axis=1, return_inverse=True)
    bucket = bucket.reshape(-1)
    for number in range(int(bucket.max(initial=-1)) + 1):
        members = np.flatnonzero(bucket == number)
        most, longest = int(pieces.rows[members].max()), int(pieces.tokens[members].max())
        limit = max(1, BLOCK_ELEMENTS // (longest * max(heads * most, kv_elements)))
        yield from np.array_split(members, -(-len(members) // limit))


def _power(sizes: Array) -> Array:
    power: Array = 1 << np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    return power


def _block(pieces: Pieces, batch: Array, q_positions: Array, device: torch.device) -> tuple[Block, int]:
    rows, tokens = pieces.rows[batch], pieces.tokens[batch]
    most, longest = int(rows.max()), int(tokens.max())
    runs = ranges(pieces.indptr[batch], np.diff(pieces.indptr)[batch])
    row = pieces.row[batch][:, None] + np.minimum(np.arange(most), rows[:, None] - 1)
    begin = np.cumsum(tokens) - tokens
    grid = begin[:, None] + np.minimum(np.arange(longest), tokens[:, None] - 1)
    slot = ranges(pieces.slot[runs], pieces.count[runs])[grid]
    position = ranges(pieces.position[runs], pieces.count[runs])[grid]

    def moved(array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    block = Block(
        row=moved(row),
        slot=moved(slot),
        tokens=moved(tokens),
        q_position=moved(q_positions[row]),
        kv_position=moved(position),
        causal=int(pieces.kind[batch[0]]) != DENSE,
        padded=bool(np.any(tokens != longest)),
    )
    return block, most


def _moved(merge: Merge, device: torch.device) -> Merge:
    levels = tuple(
        replace(level, index=None if level.index is None else level.index.to(device)) for level in merge.levels
    )
    return replace(merge, levels=levels, place=None if merge.place is None else merge.place.to(device))
