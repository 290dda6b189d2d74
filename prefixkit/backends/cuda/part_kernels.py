"""``sum_parts`` and ``gather_parts`` by our kernels, and the products that ``sum_parts`` sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import GATHER_PARTS, SHARED_PARTS, sum_name
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.cuda.struct_layout import Struct
from prefixkit.ops.shared_parts import AHEAD, BLOCKS, PLACE_BYTES, VECTOR_BYTES

_THREADS = 256  # of the kernels


def part_of_product(x: Tensor, weight: Tensor) -> Tensor:
    """``part_of_product``; the op has checked its arguments."""
    if x.dtype == torch.float32:
        return linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], weight.shape[0])


def sum_parts(
    part: Tensor, addresses: Tensor, dtype: torch.dtype, residual: Tensor | None = None, other: Tensor | None = None
) -> Tensor:
    """``sum_parts``; the op has checked its arguments."""
    total = part.new_empty(part.shape, dtype=dtype)
    given = [None if one is None else _aligned(one) for one in (part, residual, other)]
    pointers = tuple(0 if one is None else one.data_ptr() for one in (*given, total))
    vectors = total.nbytes // VECTOR_BYTES
    _launch(sum_name(layouts.dtype_name(dtype)), layouts.SUM_PARTS, part, pointers, addresses, vectors)
    return total


def gather_parts(part: Tensor, addresses: Tensor, rank: int, sent: Tensor | None = None) -> Tensor:
    """``gather_parts``; the op has checked its arguments."""
    part = _aligned(part)
    sent = part if sent is None else _aligned(sent)
    *shape, width = part.shape
    whole = part.new_empty((*shape, 2 * width))
    given, of_row = (part.data_ptr(), sent.data_ptr(), whole.data_ptr()), width * part.element_size() // VECTOR_BYTES
    vectors = part.nbytes // VECTOR_BYTES
    _launch(GATHER_PARTS, layouts.GATHER_PARTS, part, given, addresses, vectors, of_row, rank)
    return whole


def _launch(
    name: str, layout: Struct, part: Tensor, given: tuple[int, ...], addresses: Tensor, vectors: int, *more: int
) -> None:
    function = jit.load(SHARED_PARTS, part.device.index)[name]
    values = (*given, *addresses.tolist(), vectors, *more)
    grid = (min(BLOCKS, -(-vectors // _THREADS)), 1, 1)
    describe = f"{name} on {part.device}: {list(part.shape)} {part.dtype}".__str__
    kept = 0 if name == GATHER_PARTS else AHEAD * PLACE_BYTES
    launch(layout.check(function), layout, values, grid, 2 * _THREADS, kept, describe)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor
