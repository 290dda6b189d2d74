"""The contracts of ``sum_parts`` and ``gather_parts``, and the memory of two processes, each with a GPU, for both.

Memory of a process that both see (``torch_private.shared_memory``): chunks of parts that the other one writes, and a
flag for each block of a launch; ``csrc/parallel/shared_parts.cu`` says how they are used.  Both ops use the same, in
any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.ops.arguments import FLOATS, expect

BLOCKS = 128  # of a launch, at most; GPUs that are linked have as many multiprocessors
VECTOR_BYTES = 16
PLACE_BYTES = 256 * 4 * VECTOR_BYTES  # of a block: THREADS x PLACE of the kernels
SHARED_BYTES = BLOCKS * (8 * PLACE_BYTES + 4)  # 2 AHEAD places, and a flag
ADDRESSES = 5


def sum_parts(part: Tensor, addresses: Tensor, residual: Tensor | None = None) -> Tensor:
    """The sum of what both processes pass, which both get, bit for bit the same; and this plus a residual.

    Both call it as often, in the same order, with parts of one shape and dtype, as they do a collective of
    ``torch.distributed``; a CUDA graph can capture it.  The host does not wait; the GPU waits for the other one.

    Args:
        part: ``[..., width]`` on a GPU, contiguous, each row a multiple of 16 bytes.
        addresses: ``[5]`` int64 on the CPU, from :func:`addresses_of`.
        residual: Like ``part``, contiguous; what this process adds to the sum.

    Returns:
        Like ``part``, contiguous; the sum is float32 and rounded once.  With a residual it has the bits of
        ``sum + residual``: another sum in float32, of the rounded one, which is rounded too.

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
    """Columns of both processes side by side, which both get.

    Both call it, and ``sum_parts``, in one order, as said there.

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
    """What both ops take, of the memory of both processes and ``epochs``; all must outlive their calls.

    Args:
        own, theirs: ``[SHARED_BYTES]`` uint8, zero in its flags before either process calls an op.
        epochs: ``[BLOCKS]`` int32 of this process, zero.
    """
    flags = SHARED_BYTES - 4 * BLOCKS
    found: Sequence[int] = (theirs.data_ptr(), own.data_ptr(), theirs.data_ptr() + flags, own.data_ptr() + flags)
    return torch.tensor([*found, epochs.data_ptr()], dtype=torch.int64, device="cpu")


def _check(op: str, part: Tensor, addresses: Tensor) -> None:
    fits = part.ndim > 0 and part.is_contiguous() and part.shape[-1] * part.element_size() % VECTOR_BYTES == 0
    expect(op, "part", part, "[..., width], contiguous, rows of a multiple of 16 bytes", fits, FLOATS)
    fits = addresses.shape == (ADDRESSES,) and addresses.device.type == "cpu"
    expect(op, "addresses", addresses, f"[{ADDRESSES}] on the CPU", fits, (torch.int64,))
