"""``sum_parts`` by our kernel."""

from __future__ import annotations

from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import SUM_PARTS, sum_name
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.ops.part_sums import BLOCKS, VECTOR_BYTES

_THREADS = 256  # of the kernel


def sum_parts(part: Tensor, addresses: Tensor, residual: Tensor | None = None) -> Tensor:
    """``sum_parts``; the op has checked its arguments."""
    part = _aligned(part)
    residual = None if residual is None else _aligned(residual)
    total = part.new_empty(part.shape)
    vectors = part.nbytes // VECTOR_BYTES
    function = jit.load(SUM_PARTS, part.device.index)[sum_name(str(part.dtype).removeprefix("torch."))]
    given = (part.data_ptr(), 0 if residual is None else residual.data_ptr(), total.data_ptr())
    theirs, own, their_flags, own_flags, epochs = addresses.tolist()
    values = (*given, theirs, own, their_flags, own_flags, epochs, vectors)
    grid = (min(BLOCKS, -(-vectors // _THREADS)), 1, 1)
    describe = f"sum_parts on {part.device}: {list(part.shape)} {part.dtype}".__str__
    launch(layouts.SUM_PARTS.check(function), layouts.SUM_PARTS, values, grid, 2 * _THREADS, 0, describe)
    return total


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor
