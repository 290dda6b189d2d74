"""The contracts of ``sum_parts`` and ``gather_parts`` over two processes with a GPU each, and their shared memory.

Each process has memory that both see (``torch_private.shared_memory``): chunks of parts that the other process writes,
and a flag for each block of a launch; ``csrc/parallel/shared_parts.cu`` describes their use.  Both ops use the same
memory, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.ops.arguments import FLOATS, expect

BLOCKS = 128  # of a launch, at most; linked GPUs have at least as many multiprocessors
VECTOR_BYTES = 16
PLACE_BYTES = 256 * 4 * VECTOR_BYTES  # of a block: THREADS x PLACE vectors in the kernels
SHARED_BYTES = BLOCKS * (8 * PLACE_BYTES + 4)  # 2 * AHEAD places, and a flag
ADDRESSES = 5


def sum_parts(part: Tensor, addresses: Tensor, residual: Tensor | None = None) -> Tensor:
    """Sum the parts of both processes, with the same bits in both, and add a residual if there is one.

    Like a collective of ``torch.distributed``: both processes make the same calls in the same order, with parts of one
    shape and dtype.  A CUDA graph can capture it.  The host does not wait; each GPU waits for the other one.

    Args:
        part: ``[..., width]`` on a GPU, contiguous, each row a multiple of 16 bytes.
        addresses: ``[5]`` int64 on the CPU, from :func:`addresses_of`.
        residual: Like ``part``, contiguous; this process adds it to the sum.

    Returns:
        Like ``part``, contiguous; the sum is computed in float32 and rounded once.  With a residual the result has the
        bits of ``sum + residual``: the rounded sum and the residual are added in float32, and rounded again.

    Raises:
        BadShape, BadDtype, BadDevice: the arguments are not these.
        NoBackward: a gradient is recorded.
    """
    op = "sum_parts"
    _check(op, part, addresses)
    if residual is not None:
        fits = residual.shape == part.shape and residual.is_contiguous()
        expect(op, "residual", residual, f"{list(part.shape)} like part, contiguous", fits, (part.dtype,), part.device)
    return part.new_empty(part.shape)


def gather_parts(part: Tensor, addresses: Tensor, rank: int) -> Tensor:
    """Concatenate the columns of both processes; both get the result.

    Both processes call it and ``sum_parts`` in the same order, as described there.

    Args:
        part: ``[..., width]`` on a GPU, contiguous, each row a multiple of 16 bytes.
        addresses: ``[5]`` int64 on the CPU, from :func:`addresses_of`.
        rank: 0 in the process whose columns come first, 1 in the other one.

    Returns:
        ``[..., 2 * width]`` contiguous, in part's dtype.

    Raises:
        BadShape, BadDtype, BadDevice: the arguments are not these.
        ValueError: ``rank`` is neither 0 nor 1.
        NoBackward: a gradient is recorded.
    """
    op = "gather_parts"
    _check(op, part, addresses)
    if rank not in (0, 1):
        raise ValueError(f"{op}: rank must be 0 or 1, got {rank}")
    return part.new_empty((*part.shape[:-1], 2 * part.shape[-1]))


def addresses_of(own: Tensor, theirs: Tensor, epochs: Tensor) -> Tensor:
    """The ``addresses`` that both ops take: of ``own``, ``theirs`` and ``epochs``, which must outlive the calls.

    Args:
        own, theirs: ``[SHARED_BYTES]`` uint8 of each process; the flags are zero before either calls an op.
        epochs: ``[BLOCKS]`` int32 of this process, zero at first.
    """
    flags = SHARED_BYTES - 4 * BLOCKS
    found: Sequence[int] = (theirs.data_ptr(), own.data_ptr(), theirs.data_ptr() + flags, own.data_ptr() + flags)
    return torch.tensor([*found, epochs.data_ptr()], dtype=torch.int64, device="cpu")


def _check(op: str, part: Tensor, addresses: Tensor) -> None:
    fits = part.ndim > 0 and part.is_contiguous() and part.shape[-1] * part.element_size() % VECTOR_BYTES == 0
    expect(op, "part", part, "[..., width], contiguous, rows of a multiple of 16 bytes", fits, FLOATS)
    fits = addresses.shape == (ADDRESSES,) and addresses.device.type == "cpu"
    expect(op, "addresses", addresses, f"[{ADDRESSES}] on the CPU", fits, (torch.int64,))
