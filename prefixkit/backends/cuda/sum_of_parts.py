"""``sum_parts`` by our kernel."""

from __future__ import annotations

from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import SUM_PARTS, sum_name
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.ops.part_sums import BLOCKS, VECTOR_BYTES

_THREADS = 512


def sum_parts(part: Tensor, addresses: Tensor) -> Tensor:
    """``sum_parts``; the op has checked its arguments."""
    if part.data_ptr() % VECTOR_BYTES:
        part = part.clone()
    total = part.new_empty(part.shape)
    vectors = part.nbytes // VECTOR_BYTES
    function = jit.load(SUM_PARTS, part.device.index)[sum_name(str(part.dtype).removeprefix("torch."))]
    theirs, own, their_flags, own_flags, epochs = addresses.tolist()
    values = (part.data_ptr(), total.data_ptr(), theirs, own, their_flags, own_flags, epochs, vectors, BLOCKS)
    grid = (min(BLOCKS, -(-vectors // _THREADS)), 1, 1)
    describe = f"sum_parts on {part.device}: {list(part.shape)} {part.dtype}".__str__
    launch(layouts.SUM_PARTS.check(function), layouts.SUM_PARTS, values, grid, _THREADS, 0, describe)
    return total
