"""``advance`` by our kernel; see the op for its contract."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.units import ADVANCE
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch

_THREADS = 128


def advance(
    leaf: Tensor,
    start: Tensor,
    length: Tensor,
    page_indptr: Tensor,
    pages: Tensor,
    first_slot: Tensor,
    sampled: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: int,
    page_size: int,
) -> None:
    """``advance``."""
    tensors = (leaf, start, length, page_indptr, pages, first_slot, sampled, tokens, positions, slots)
    values = (*(tensor.data_ptr() for tensor in tensors), rows, page_size)
    say = f"advance on {leaf.device}: {rows} rows".__str__
    launch(_function(leaf.device.index), layouts.ADVANCE, values, (-(-rows // _THREADS), 1, 1), _THREADS, 0, say)


@cache
def _function(device: int) -> jit.Function:
    function = jit.load(ADVANCE, device)[ADVANCE.names[0]]
    layouts.ADVANCE.check(function)
    return function
