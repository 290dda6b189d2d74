"""The contracts of ``part_of_product``, ``sum_parts`` and ``gather_parts``: two processes with a GPU each.

Each process has memory that both see (``torch_private.shared_memory``): chunks of parts that the other process writes,
and a flag for each block of a launch; ``csrc/parallel/shared_parts.cu`` describes their use.  Sums and gathers use
the same memory, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.ops.arguments import FLOATS, BadDtype, expect

BLOCKS = 128  # of a launch, at most; linked GPUs have at least as many multiprocessors
VECTOR_BYTES = 16
PLACE_BYTES = 256 * 4 * VECTOR_BYTES  # of a block: THREADS x PLACE vectors in the kernels
AHEAD = 4  # places that a block's writers may be ahead of its readers
SHARED_BYTES = BLOCKS * (2 * AHEAD * PLACE_BYTES + 4)  # places, and a flag
ADDRESSES = 5


def part_of_product(x: Tensor, weight: Tensor) -> Tensor:
    """This process's part of a product that ``sum_parts`` sums over processes.

    Args:
        x: ``[..., width]``, the columns that this process has.
        weight: ``[columns, width]``, the same columns of a weight.

    Returns:
        ``[..., columns]`` contiguous, ``x @ weight.T`` in float32: products in 16 bits are not rounded.

    Raises:
        BadShape, BadDtype, BadDevice: the arguments do not fit each other.
        NoBackward: a gradient is recorded.
    """
    op, fits = "part_of_product", weight.ndim == 2
    expect(op, "weight", weight, "[columns, width]", fits, FLOATS)
    fits = x.ndim > 0 and x.shape[-1] == weight.shape[1]
    shape = f"[..., {weight.shape[1]}] (width of weight)"
    expect(op, "x", x, shape, fits, (weight.dtype,), weight.device, " like weight")
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


def sum_parts(
    part: Tensor, addresses: Tensor, dtype: torch.dtype, residual: Tensor | None = None, other: Tensor | None = None
) -> Tensor:
    """Sum the parts of both processes, with the same bits in both, and add up to two residuals.

    Like a collective of ``torch.distributed``: both processes make the same calls in the same order, with parts of one
    shape and sums of one dtype.  A CUDA graph can capture it.  The host does not wait; each GPU waits for the other.

    Args:
        part: ``[..., width]`` float32 on a GPU, contiguous.  Of a sum in 16 bits eight adjacent numbers of a part are
            rounded to multiples of one power of two, by at most 2**-14 of the largest: 16 bytes cross the link.
        addresses: ``[5]`` int64 on the CPU, from :func:`addresses_of`.
        dtype: Of the sum; a row of it is a multiple of 16 bytes.
        residual, other: Like the sum, contiguous; this process adds them to it.  ``other`` comes with ``residual``.

    Returns:
        ``[..., width]`` in ``dtype``, contiguous; the sum is computed in float32 and rounded once.  With a residual the
        result has the bits of ``sum + residual``: the rounded sum and the residual are added in float32, and rounded
        again.  With another one it is ``(residual + other) + sum``, likewise, as inductor adds within a kernel.

    Raises:
        BadShape, BadDtype, BadDevice: the arguments are not these.
        ValueError: ``other`` is given without ``residual``.
        NoBackward: a gradient is recorded.
    """
    op = "sum_parts"
    if dtype not in FLOATS:
        raise BadDtype(f"{op}: dtype must be {' or '.join(map(str, FLOATS))}, got {dtype}")
    _check(op, part, addresses, dtype, (torch.float32,))
    if other is not None and residual is None:
        raise ValueError(f"{op}: other is added besides residual, which is None; give it as residual")
    for name, one in (("residual", residual), ("other", other)):
        if one is not None:
            fits = one.shape == part.shape and one.is_contiguous()
            expect(op, name, one, f"{list(part.shape)} like part, contiguous", fits, (dtype,), part.device)
    return part.new_empty(part.shape, dtype=dtype)


def gather_parts(part: Tensor, addresses: Tensor, rank: int, sent: Tensor | None = None) -> Tensor:
    """Concatenate the columns of both processes.

    Both processes call it and ``sum_parts`` in the same order, as described there.

    Args:
        part: ``[..., width]`` on a GPU, contiguous, each row a multiple of 16 bytes.
        addresses: ``[5]`` int64 on the CPU, from :func:`addresses_of`.
        rank: 0 in the process whose columns come first, 1 in the other one.
        sent: Like ``part``: the columns that the other process gets.  None: ``part``, and both get the same result.

    Returns:
        ``[..., 2 * width]`` contiguous, in part's dtype: ``part`` and what the other process has sent.

    Raises:
        BadShape, BadDtype, BadDevice: the arguments are not these.
        ValueError: ``rank`` is neither 0 nor 1.
        NoBackward: a gradient is recorded.
    """
    op = "gather_parts"
    _check(op, part, addresses, part.dtype, FLOATS)
    if sent is not None:
        fits = sent.shape == part.shape and sent.is_contiguous()
        expect(op, "sent", sent, f"{list(part.shape)} like part, contiguous", fits, (part.dtype,), part.device)
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


def _check(op: str, part: Tensor, addresses: Tensor, sent: torch.dtype, dtypes: Sequence[torch.dtype]) -> None:
    fits = part.ndim > 0 and part.is_contiguous() and part.shape[-1] * sent.itemsize % VECTOR_BYTES == 0
    shape = f"[..., width], contiguous, rows of a multiple of 16 bytes in {sent}"
    expect(op, "part", part, shape, fits, dtypes)
    fits = addresses.shape == (ADDRESSES,) and addresses.device.type == "cpu"
    expect(op, "addresses", addresses, f"[{ADDRESSES}] on the CPU", fits, (torch.int64,))
