"""The contract of ``sum_parts``, and the memory by which two processes, each with a GPU, sum what they have.

Memory of a process that both see (``torch_private.shared_memory``): chunks of parts that the other one writes, and a
flag for each block of a launch; ``csrc/parallel/sum_parts.cu`` says how they are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.ops.arguments import FLOATS, expect

BLOCKS = 128  # of a launch, at most; GPUs that are linked have as many multiprocessors
VECTOR_BYTES = 16
CHUNK_BYTES = 256 * 3 * VECTOR_BYTES  # of a block: THREADS x VECTORS of the kernel
SHARED_BYTES = BLOCKS * (8 * CHUNK_BYTES + 4)  # 2 AHEAD chunks, and a flag
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
    fits = part.ndim > 0 and part.is_contiguous() and part.shape[-1] * part.element_size() % VECTOR_BYTES == 0
    expect(op, "part", part, "[..., width], contiguous, rows of a multiple of 16 bytes", fits, FLOATS)
    fits = addresses.shape == (ADDRESSES,) and addresses.device.type == "cpu"
    expect(op, "addresses", addresses, f"[{ADDRESSES}] on the CPU", fits, (torch.int64,))
    if residual is not None:
        fits = residual.shape == part.shape and residual.is_contiguous()
        expect(op, "residual", residual, f"{list(part.shape)} like part, contiguous", fits, (part.dtype,), part.device)
    return part.new_empty(part.shape)


def addresses_of(own: Tensor, theirs: Tensor, epochs: Tensor) -> Tensor:
    """What ``sum_parts`` takes, of the memory of both processes and ``epochs``; all must outlive its calls.

    Args:
        own, theirs: ``[SHARED_BYTES]`` uint8, zero in its flags before either process sums.
        epochs: ``[BLOCKS]`` int32 of this process, zero.
    """
    flags = SHARED_BYTES - 4 * BLOCKS
    found: Sequence[int] = (theirs.data_ptr(), own.data_ptr(), theirs.data_ptr() + flags, own.data_ptr() + flags)
    return torch.tensor([*found, epochs.data_ptr()], dtype=torch.int64, device="cpu")
