"""``kv_append``, ``rotary_append``, ``index_append`` and ``advance`` in plain torch; see the ops for their contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixkit.checking import checked
from prefixkit.ops.arguments import FP8, check_append, check_append_slots, check_index_append, check_rotary

MOST_FP8 = torch.finfo(FP8).max


@torch.no_grad()
def kv_append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """``kv_append``."""
    check_append(key, value, k_pages, v_pages, slots)
    append("kv_append", (key, value), (k_pages, v_pages), slots)


@torch.no_grad()
def index_append(keys: Tensor, pages: Tensor, slots: Tensor) -> None:
    """``index_append``."""
    check_index_append(keys, pages, slots)
    append("index_append", (keys,), (pages,), slots)


@torch.no_grad()
def rotary_append(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Tensor:
    """``rotary_append``."""
    check_rotary(q, key, value, cos, sin, k_pages, v_pages, slots)
    append("rotary_append", (rotate(key, cos, sin), value), (k_pages, v_pages), slots)
    return rotate(q, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head (Su et al., RoFormer; halves as in Llama), in float32, rounded once.

    Args:
        x: ``[T, heads, head_dim]``.
        cos, sin: ``[T, head_dim]``.

    Returns:
        Like ``x``, contiguous.
    """
    x32, half = x.float(), x.shape[-1] // 2
    rotated = torch.cat((-x32[..., half:], x32[..., :half]), dim=-1)
    return (x32 * cos.float()[:, None] + rotated * sin.float()[:, None]).to(x.dtype).contiguous()


def append(op: str, states: Sequence[Tensor], pages: Sequence[Tensor], slots: Tensor) -> None:
    """Write rows to their slots in pages of one dtype, with the contract of ``kv_append``; arguments are checked."""
    if pages[0].dtype == FP8:  # written as bytes, which all of torch's ways to index support
        states = [as_stored(each).view(torch.uint8) for each in states]
        pages = [each.view(torch.uint8) for each in pages]
    (_append_on_cpu if slots.device.type == "cpu" else append_on_gpu)(op, states, pages, slots)


def _append_on_cpu(op: str, states: Sequence[Tensor], pages: Sequence[Tensor], slots: Tensor) -> None:
    num_slots, numbers = pages[0].shape[0] * pages[0].shape[1], slots.numpy()
    # As unsigned numbers, -1 and all other numbers that are no slot are at least num_slots.
    if numbers.view(np.uint64).max(initial=0) >= num_slots:
        writes = numbers != -1
        if (numbers[writes].view(np.uint64) >= num_slots).any():
            raise IndexError(
                f"{op}: slots {int(numbers.min())}..{int(numbers.max())}, but the pages hold slots "
                f"0..{num_slots - 1}, and only -1 says that a row writes nothing"
            )
        rows = torch.from_numpy(np.flatnonzero(writes))
        states, slots = [of[rows] for of in states], slots[rows]
    for each, values in zip(pages, states, strict=True):
        page_size = each.shape[1]
        if each.stride(0) == page_size * each.stride(1):  # token-major: slots are rows of one matrix
            each.flatten(0, 1).index_copy_(0, slots, values)
        else:
            each[slots // page_size, slots % page_size] = values


def as_stored(states: Tensor) -> Tensor:
    """Round to e4m3; larger numbers become its largest, and NaN stays NaN."""
    return states.clamp(-MOST_FP8, MOST_FP8).to(FP8)


def append_on_gpu(op: str, states: Sequence[Tensor], pages: Sequence[Tensor], slots: Tensor) -> None:
    """Write rows to their slots, on any device; the host does not wait to learn which rows have a slot."""
    tokens, page_size = slots.shape[0], pages[0].shape[1]
    num_slots = pages[0].shape[0] * page_size
    if checked():
        check_append_slots(op, slots, pages[0])
    if not tokens or not num_slots:
        return
    valid = (slots >= 0) & (slots < num_slots)
    # A row that must write nothing repeats the write of another row; if no row writes, all rewrite slot 0's content.
    some = valid.to(torch.uint8).argmax(dim=0, keepdim=True)
    writes = valid.index_select(0, some)
    row = torch.where(valid, torch.arange(tokens, device=slots.device), some)
    slot = torch.where(writes, slots[row], 0)
    where = (slot // page_size, slot % page_size)
    for each, values in zip(pages, states, strict=True):
        each.index_put_(where, torch.where(writes[:, None, None], values[row], each[0, 0]))


def advance(*arguments: Any) -> None:
    """``advance``."""
    leaf, start, length, page_indptr, pages, first_slot, sampled, tokens, positions, slots, rows, page_size = arguments
    leaf = leaf[:rows].long()
    padding, node = leaf < 0, leaf.clamp(min=0)
    offset = length[node].long()
    within = first_slot[node] + offset
    page = page_indptr[node] + within // page_size
    valid = (page < page_indptr[node + 1]) & ~padding
    slot = pages[torch.where(valid, page, 0)].long() * page_size + within % page_size
    slots[:rows] = torch.where(valid, slot, -1)
    positions[:rows] = torch.where(padding, 0, start[node] + offset - (~valid).long())
    tokens[:rows] = torch.where(padding, 0, sampled[:rows].clamp(min=0))
    length[node[valid]] += 1
