"""``sum_parts`` and ``gather_parts`` by our kernels."""

from __future__ import annotations

from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import GATHER_PARTS, SHARED_PARTS, sum_name
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.cuda.struct_layout import Struct
from prefixkit.ops.shared_parts import BLOCKS, VECTOR_BYTES

_THREADS = 256  # of the kernels


def sum_parts(part: Tensor, addresses: Tensor, residual: Tensor | None = None) -> Tensor:
    """``sum_parts``; the op has checked its arguments."""
    part = _aligned(part)
    residual = None if residual is None else _aligned(residual)
    total = part.new_empty(part.shape)
    given = (part.data_ptr(), 0 if residual is None else residual.data_ptr(), total.data_ptr())
    _launch(sum_name(layouts.dtype_name(part.dtype)), layouts.SUM_PARTS, part, given, addresses)
    return total


def gather_parts(part: Tensor, addresses: Tensor, rank: int) -> Tensor:
    """``gather_parts``; the op has checked its arguments."""
    part = _aligned(part)
    *shape, width = part.shape
    whole = part.new_empty((*shape, 2 * width))
    given, vectors = (part.data_ptr(), whole.data_ptr()), width * part.element_size() // VECTOR_BYTES
    _launch(GATHER_PARTS, layouts.GATHER_PARTS, part, given, addresses, vectors, rank)
    return whole


def _launch(name: str, layout: Struct, part: Tensor, given: tuple[int, ...], addresses: Tensor, *more: int) -> None:
    vectors = part.nbytes // VECTOR_BYTES
    function = jit.load(SHARED_PARTS, part.device.index)[name]
    values = (*given, *addresses.tolist(), vectors, *more)
    grid = (min(BLOCKS, -(-vectors // _THREADS)), 1, 1)
    describe = f"{name} on {part.device}: {list(part.shape)} {part.dtype}".__str__
    launch(layout.check(function), layout, values, grid, 2 * _THREADS, 0, describe)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor
