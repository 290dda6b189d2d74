"""``kv_append``, ``rotary_append`` and ``advance`` by our kernels: check, pick the instantiation, pack its argument.

A model calls each op again and again with tensors of the same shapes.  So a call is checked, and its launch prepared,
once for each signature: its shapes, strides, dtypes and devices.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import ADVANCE, APPEND, ROTARY, VECTORS, append_e4m3_name, rotary_name
from prefixkit.backends.torch.plain_kv import rotate
from prefixkit.checking import checked
from prefixkit.cuda import jit
from prefixkit.cuda.launch import LaunchCache, launch, signature_of
from prefixkit.ops.arguments import FP8, check_append, check_append_slots, check_rotary

log = logging.getLogger("prefixkit")

_THREADS, _ADVANCE_THREADS = 256, 128
_VECTOR = 16

# Launches without pointers: the kernel, the rest of its argument, its grid; for rotations also whether the GPU has PDL.
_Appending = tuple[jit.Function, tuple[int, ...], tuple[int, int, int]]
_Rotation = tuple[jit.Function, tuple[int, ...], tuple[int, int, int], bool]


class Append:
    """The ops ``kv_append`` and ``rotary_append``, and their prepared launches."""

    def __init__(self) -> None:
        self._appends: LaunchCache[_Appending] = LaunchCache()
        self._rotations: LaunchCache[tuple[_Rotation | None]] = LaunchCache()  # None: no kernel

    def kv_append(self, key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """``kv_append``."""
        pointers = (key.data_ptr(), value.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), slots.data_ptr())
        aligned = (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15
        signature = (aligned, *map(signature_of, (key, value, k_pages, v_pages, slots)))
        prepared = self._appends.get(signature)
        if prepared is None:
            check_append(key, value, k_pages, v_pages, slots)
            if k_pages.shape != v_pages.shape:  # the kernel writes heads of one size
                self.kv_append(key, key, k_pages, k_pages, slots)
                return self.kv_append(value, value, v_pages, v_pages, slots)
            if key.stride(2) != 1 or value.stride(2) != 1 or not slots.is_contiguous():
                return self.kv_append(key.contiguous(), value.contiguous(), k_pages, v_pages, slots.contiguous())
            prepared = self._appends.store(signature, _prepare_append(key, value, k_pages, v_pages, aligned))
        function, constants, grid = prepared
        if checked():
            check_append_slots("kv_append", slots, k_pages)
        launch(function, layouts.MOVE, pointers + constants, grid, _THREADS, 0, describe("kv_append", key, k_pages))

    def rotary_append(self, *tensors: Tensor) -> Tensor:
        """``rotary_append``: one launch, or plain torch and ``kv_append`` if rows are not whole 16-byte vectors."""
        q, key, value, cos, sin, k_pages, v_pages, slots = tensors
        pointers = [tensor.data_ptr() for tensor in tensors]
        aligned = functools.reduce(int.__or__, pointers[:7]) % _VECTOR == 0
        signature = (aligned, *map(signature_of, tensors))
        known = self._rotations.get(signature)
        if known is None:
            check_rotary(*tensors)
            alike = k_pages.shape == v_pages.shape
            known = self._rotations.store(signature, (_prepare_rotary(*tensors) if aligned and alike else None,))
            if known[0] is None:
                why = "not all of it lies at 16 bytes" if alike else "K and V differ in head size"
                log.info("rotary_append on %s runs as torch and kv_append: %s", q.device, why)
        if (prepared := known[0]) is None:
            self.kv_append(rotate(key, cos, sin), value, k_pages, v_pages, slots)
            return rotate(q, cos, sin)
        function, constants, grid, pdl = prepared
        if checked():
            check_append_slots("rotary_append", slots, k_pages)
        rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        values = (*pointers[:5], rotated.data_ptr(), *pointers[5:], *constants)
        launch(function, layouts.ROTARY, values, grid, _THREADS, 0, describe("rotary_append", q, key, k_pages), pdl=pdl)
        return rotated


def describe(op: str, *tensors: Tensor) -> Callable[[], str]:
    """A function that describes a call, for errors."""

    def described() -> str:
        shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype} strides {list(tensor.stride())}" for tensor in tensors)
        return f"{op} on {tensors[0].device}: {shapes}"

    return described


def _prepare_append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, aligned: int) -> _Appending:
    tokens, kv_heads, head_dim = key.shape
    num_pages, page_size = k_pages.shape[:2]
    rows, pages = _byte_strides(key, value), _byte_strides(k_pages, v_pages)
    size, head = key.element_size(), head_dim * key.element_size()
    widest = math.gcd(_VECTOR, aligned or _VECTOR, head, *rows, *pages)
    if k_pages.dtype == FP8:
        each = _VECTOR // size if widest == _VECTOR else 1
        name, width = append_e4m3_name(layouts.dtype_name(key.dtype), each), each * size
    else:
        width = next(width for width in VECTORS if widest % width == 0)
        name, each = f"prefixkit::kv_append<{VECTORS[width]}>", width // size
    vectors, in_page = head // width, each * k_pages.element_size()
    strides = (*(stride // width for stride in rows), *(stride // in_page for stride in pages))
    constants = (*strides, num_pages * page_size, tokens, kv_heads, vectors, page_size)
    function = jit.load(APPEND, k_pages.device.index)[name]
    return layouts.MOVE.check(function), constants, (-(-tokens * kv_heads * vectors // _THREADS), 1, 1)


def _byte_strides(*tensors: Tensor) -> list[int]:
    """Strides in bytes of each tensor's axes except the last; 0 for an axis of one element."""
    return [
        stride * x.element_size() if length > 1 else 0
        for x in tensors
        for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    ]


def _prepare_rotary(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> _Rotation | None:
    """The launch; None if rows are not whole 16-byte vectors."""
    (tokens, heads, head_dim), kv_heads = q.shape, key.shape[1]
    num_pages, page_size = k_pages.shape[:2]
    rows, pages = _byte_strides(q, key, value, cos, sin), _byte_strides(k_pages, v_pages)
    half, e4m3 = head_dim * q.element_size() // 2, k_pages.dtype == FP8
    adjacent = all(x.stride(-1) == 1 for x in (q, key, value, cos, sin)) and slots.is_contiguous()
    threads = tokens * (heads + kv_heads) * (half // _VECTOR)
    if not adjacent or any(stride % _VECTOR for stride in (half, *rows, *pages)) or threads >= 2**32 - _THREADS:
        return None
    device = k_pages.device.index
    function = layouts.ROTARY.check(jit.load(ROTARY, device)[rotary_name(layouts.dtype_name(q.dtype), e4m3)])
    in_page = _VECTOR // q.element_size() * k_pages.element_size()
    strides = (*(stride // _VECTOR for stride in rows), *(stride // in_page for stride in pages))
    constants = (*strides, num_pages * page_size, tokens, heads, kv_heads, half // _VECTOR, page_size)
    return function, constants, (-(-threads // _THREADS), 1, 1), torch.cuda.get_device_capability(device) >= (9, 0)


def advance(*arguments: Any) -> None:
    """``advance``."""
    *tensors, rows, page_size = arguments
    device = tensors[0].device
    values = (*(tensor.data_ptr() for tensor in tensors), rows, page_size)
    describe = f"advance on {device}: {rows} rows".__str__
    grid = (-(-rows // _ADVANCE_THREADS), 1, 1)
    launch(_advance_kernel(device.index), layouts.ADVANCE, values, grid, _ADVANCE_THREADS, 0, describe)


@functools.cache
def _advance_kernel(device: int) -> jit.Function:
    return layouts.ADVANCE.check(jit.load(ADVANCE, device)[ADVANCE.names[0]])
