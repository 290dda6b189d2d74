"""One fused kernel that merges the partial states of all levels of a tree, as a careful user of Hydragen would."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8  # rows of one program


@triton.jit
def _merge(
    out, parts, lses, rows_per_node, part_strides, lse_strides, total, heads, group, D: tl.constexpr, R: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = row < total
    query = row // heads
    head = row % heads
    kv_head = head // group
    column = tl.arange(0, D)
    top = tl.full((R,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((R,), tl.float32)
    value = tl.zeros((R, D), tl.float32)
    for i in tl.static_range(len(parts)):
        node = (query // rows_per_node[i]).to(tl.int64)
        place = (query % rows_per_node[i]) * group + head % group
        at = node * part_strides[i][0] + kv_head * part_strides[i][1] + place * part_strides[i][2]
        lse_at = node * lse_strides[i][0] + kv_head * lse_strides[i][1] + place * lse_strides[i][2]
        lse = tl.load(lses[i] + lse_at, mask=inside, other=float("-inf"))
        x = tl.load(parts[i] + at[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        now = tl.maximum(top, lse)
        old, new = tl.exp(top - now), tl.exp(lse - now)
        value = value * old[:, None] + x * new[:, None]
        weight_sum = weight_sum * old + new
        top = now
    value = value / weight_sum[:, None]
    where = row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(out + where, value.to(out.dtype.element_ty), mask=inside[:, None])


def merge(parts: list[Tensor], lses: list[Tensor], rows_per_node: list[int], heads: int) -> Tensor:
    """``[rows, heads, head size]`` in the parts' dtype from the levels' partial states.

    Each level has ``[nodes, kv_heads, rows below x group, head size]``, any strides but 1 over the last, the natural
    ``lses`` without the last, float32, and ``rows_per_node`` queries below each node.
    """
    nodes, kv_heads, _, head_dim = parts[0].shape
    rows = nodes * rows_per_node[0]
    out = torch.empty(rows, heads, head_dim, dtype=parts[0].dtype, device=parts[0].device)
    strides = tuple(tuple(part.stride()[:3]) for part in parts), tuple(tuple(lse.stride()) for lse in lses)
    levels, sizes = (tuple(parts), tuple(lses), tuple(rows_per_node)), (rows * heads, heads, heads // kv_heads)
    _merge[(triton.cdiv(rows * heads, ROWS),)](out, *levels, *strides, *sizes, D=head_dim, R=ROWS, num_warps=4)
    return out
