"""The ops by our kernels: check, pick the instantiation, pack its argument, launch.

A model calls each op again and again with tensors of the same shapes.  So what a call must be and how it is launched is worked
out once per set of shapes, strides and dtypes, and found again by these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from prefixkit.attention import jit
from prefixkit.attention.checks import check_append, check_copy, check_merge
from prefixkit.attention.cuda_checks import check_append_slots, check_merge_numbers, check_slot_numbers, checked
from prefixkit.attention.cuda_launch import Layout, launch
from prefixkit.attention.cuda_units import APPEND, MERGE, WIDTHS

# Pointers of rows and pages, slots; strides of K rows, V rows, K pages, V pages; slots; tokens, heads, vectors, page size.
_MOVE = Layout("PPPPP qq qq qqq qqq q iiii".replace(" ", ""))
_MERGE = Layout("PPPPPP qq qq iiii".replace(" ", ""))
_MOVE_THREADS = 256
_MERGE_THREADS = 128

_T = TypeVar("_T")
# Shapes seen, per op: prefills come in many lengths, so the table is emptied when full.
_MEMO_SIZE = 4096
_memo: dict[Hashable, object] = {}


@dataclass(frozen=True, eq=False)
class _Ready:
    """A launch but for its pointers: the kernel, the rest of its argument, its blocks."""

    function: jit.Function
    constants: tuple[int, ...]
    grid: tuple[int, int, int]


def _remember(key: Hashable, ready: _T) -> _T:
    if len(_memo) >= _MEMO_SIZE:
        _memo.clear()
    _memo[key] = ready
    return ready


def kv_append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """``kv_append``."""
    pointers = (key.data_ptr(), value.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), slots.data_ptr())
    aligned = (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15
    signature = ("append", aligned, *_form(key), *_form(value), *_form(k_pages), *_form(v_pages), *_form(slots))
    ready = _memo.get(signature)
    if ready is None:
        check_append(key, value, k_pages, v_pages, slots)
        if key.stride(2) != 1 or value.stride(2) != 1 or not slots.is_contiguous():
            return kv_append(key.contiguous(), value.contiguous(), k_pages, v_pages, slots.contiguous())
        ready = _remember(signature, _move("append", key, value, k_pages, v_pages, slots, aligned))
    assert isinstance(ready, _Ready)
    if checked():
        check_append_slots("kv_append", slots, k_pages)
    launch(
        ready.function, _MOVE, pointers + ready.constants, ready.grid, _MOVE_THREADS, 0, say("kv_append", key, k_pages)
    )


def kv_copy(k_pages: Tensor, v_pages: Tensor, source: Tensor, target: Tensor) -> None:
    """``kv_copy``, through a scratch buffer: every source is read before any target is written."""
    check_copy(k_pages, v_pages, source, target)
    if not source.is_contiguous() or not target.is_contiguous():
        source, target = source.contiguous(), target.contiguous()
    if checked():
        num_slots = k_pages.shape[0] * k_pages.shape[1]
        check_slot_numbers("kv_copy", "source", source, num_slots, distinct=False)
        check_slot_numbers("kv_copy", "target", target, num_slots, distinct=True)
    shape = (2, len(source), *k_pages.shape[2:])
    rows = torch.empty(shape, dtype=k_pages.dtype, device=k_pages.device)
    key, value = rows[0], rows[1]
    aligned = (key.data_ptr() | value.data_ptr() | k_pages.data_ptr() | v_pages.data_ptr()) & 15
    described = say("kv_copy", source, k_pages)
    for way, slots in (("gather", source), ("append", target)):
        signature = (way, aligned, *_form(key), *_form(value), *_form(k_pages), *_form(v_pages), *_form(slots))
        ready = _memo.get(signature)
        if ready is None:
            ready = _remember(signature, _move(way, key, value, k_pages, v_pages, slots, aligned))
        assert isinstance(ready, _Ready)
        pointers = tuple(tensor.data_ptr() for tensor in (key, value, k_pages, v_pages, slots))
        launch(ready.function, _MOVE, pointers + ready.constants, ready.grid, _MOVE_THREADS, 0, described)


def merge_states(out: Tensor, lse: Tensor, indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``merge_states``."""
    signature = ("merge", out.data_ptr() & 15, *_form(out), *_form(lse), *_form(indptr), *_form(indices))
    ready = _memo.get(signature)
    if ready is None:
        check_merge(out, lse, indptr, indices)
        if out.stride(2) != 1 or not indptr.is_contiguous() or not indices.is_contiguous():
            return merge_states(out.contiguous(), lse, indptr.contiguous(), indices.contiguous())
        ready = _remember(signature, _merging(out, lse, indptr))
    assert isinstance(ready, _Ready)
    if checked():
        check_merge_numbers("merge_states", out.shape[0], indptr, indices)
    rows = indptr.shape[0] - 1
    merged = out.new_empty((rows, *out.shape[1:]))
    merged_lse = lse.new_empty((rows, lse.shape[1]))
    pointers = tuple(tensor.data_ptr() for tensor in (out, lse, indptr, indices, merged, merged_lse))
    described = say("merge_states", out, indptr)
    launch(ready.function, _MERGE, pointers + ready.constants, ready.grid, _MERGE_THREADS, 0, described)
    return merged, merged_lse


def _form(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def say(op: str, *tensors: Tensor) -> Callable[[], str]:
    """What an error says of a call."""

    def described() -> str:
        shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype} strides {list(tensor.stride())}" for tensor in tensors)
        return f"{op} on {tensors[0].device}: {shapes}"

    return described


def _move(
    way: str, key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, aligned: int
) -> _Ready:
    """The launch that moves rows and pages of these forms."""
    size = key.element_size()
    tokens, kv_heads, head_dim = key.shape
    num_pages, page_size = k_pages.shape[:2]
    strides = [*_row_strides(key), *_row_strides(value), *k_pages.stride()[:3], *v_pages.stride()[:3]]
    # An axis of one element has no step.
    lengths = [tokens, kv_heads] * 2 + [num_pages, page_size, kv_heads] * 2
    strides = [stride if length > 1 else 0 for stride, length in zip(strides, lengths, strict=True)]
    widest = math.gcd(16, aligned or 16, head_dim * size, *(stride * size for stride in strides))
    width = next(width for width in WIDTHS if widest % width == 0)
    vectors = head_dim * size // width
    threads = tokens * kv_heads * vectors
    constants = (
        *(stride * size // width for stride in strides),
        num_pages * page_size,
        tokens,
        kv_heads,
        vectors,
        page_size,
    )
    function = jit.load(APPEND, k_pages.device.index)[f"prefixkit::kv_{way}<{width}>"]
    _MOVE.check(function)
    return _Ready(function, constants, (-(-threads // _MOVE_THREADS), 1, 1))


def _row_strides(tensor: Tensor) -> tuple[int, int]:
    return tensor.stride(0), tensor.stride(1)


def _merging(out: Tensor, lse: Tensor, indptr: Tensor) -> _Ready:
    """The launch that merges partial states of these forms."""
    partials, heads, head_dim = out.shape
    rows = indptr.shape[0] - 1
    strides = (out.stride(0), out.stride(1))
    four = not (head_dim % 4 or out.data_ptr() % 16 or strides[0] % 4 or strides[1] % 4)
    function = jit.load(MERGE, out.device.index)[f"prefixkit::merge_states<{4 if four else 1}>"]
    _MERGE.check(function)
    warps = _MERGE_THREADS // 32
    constants = (*strides, lse.stride(0), lse.stride(1), rows, heads, head_dim, partials)
    return _Ready(function, constants, (-(-rows * heads // warps), 1, 1))
