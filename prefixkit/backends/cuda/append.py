"""The ops by our kernels: check, pick the instantiation, pack its argument, launch.

A model calls each op again and again with tensors of the same shapes.  So what a call must be and how it is launched is worked
out once per set of shapes, strides and dtypes, and found again by these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from prefixkit.backends.cuda.layouts import MOVE
from prefixkit.backends.cuda.units import APPEND, VECTORS
from prefixkit.checking import checked
from prefixkit.cuda import jit
from prefixkit.cuda.launch import form, launch
from prefixkit.ops.checks import check_append, check_append_slots

_MOVE_THREADS = 256

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
    signature = ("append", aligned, *form(key), *form(value), *form(k_pages), *form(v_pages), *form(slots))
    ready = _memo.get(signature)
    if ready is None:
        check_append(key, value, k_pages, v_pages, slots)
        if key.stride(2) != 1 or value.stride(2) != 1 or not slots.is_contiguous():
            return kv_append(key.contiguous(), value.contiguous(), k_pages, v_pages, slots.contiguous())
        ready = _remember(signature, _append(key, value, k_pages, v_pages, aligned))
    assert isinstance(ready, _Ready)
    if checked():
        check_append_slots("kv_append", slots, k_pages)
    launch(
        ready.function, MOVE, pointers + ready.constants, ready.grid, _MOVE_THREADS, 0, say("kv_append", key, k_pages)
    )


def say(op: str, *tensors: Tensor) -> Callable[[], str]:
    """What an error says of a call."""

    def described() -> str:
        shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype} strides {list(tensor.stride())}" for tensor in tensors)
        return f"{op} on {tensors[0].device}: {shapes}"

    return described


def _append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, aligned: int) -> _Ready:
    """The launch that appends rows of these forms to such pages."""
    size = key.element_size()
    tokens, kv_heads, head_dim = key.shape
    num_pages, page_size = k_pages.shape[:2]
    strides = [*_row_strides(key), *_row_strides(value), *k_pages.stride()[:3], *v_pages.stride()[:3]]
    # An axis of one element has no step.
    lengths = [tokens, kv_heads] * 2 + [num_pages, page_size, kv_heads] * 2
    strides = [stride if length > 1 else 0 for stride, length in zip(strides, lengths, strict=True)]
    widest = math.gcd(16, aligned or 16, head_dim * size, *(stride * size for stride in strides))
    width = next(width for width in VECTORS if widest % width == 0)
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
    function = jit.load(APPEND, k_pages.device.index)[f"prefixkit::kv_append<{VECTORS[width]}>"]
    MOVE.check(function)
    return _Ready(function, constants, (-(-threads // _MOVE_THREADS), 1, 1))


def _row_strides(tensor: Tensor) -> tuple[int, int]:
    return tensor.stride(0), tensor.stride(1)
