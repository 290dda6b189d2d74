"""``sample`` by our kernel: one launch that a CUDA graph can capture; see the op for its contract."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import SAMPLE, WARPS, SampleTiling, named_kernel, sample_name, sample_tiling
from prefixkit.backends.torch.drawn import write_drawn
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch

_THREADS = 32 * WARPS
# From this number of rows on, fewer and larger blocks per row are faster: 7 to 20% at 1,024 and 4,096 rows (H200).
_MANY_ROWS = 512
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def sample(
    logits: Tensor,
    records: Tensor,
    seen: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    drawn: Tensor | None = None,
    allowed: Tensor | None = None,
) -> None:
    """``sample``.  The kernel does not compute ``drawn``; torch does, after the launch."""
    if drawn is None:
        return _launch(logits, records, seen, tokens, logprobs, allowed)
    seen_before = seen[: len(logits)].clone()  # the kernel adds the sampled tokens
    _launch(logits, records, seen, tokens, logprobs, allowed)
    write_drawn(logits, records, seen_before, tokens, drawn, allowed)


def _launch(
    logits: Tensor, records: Tensor, seen: Tensor, tokens: Tensor, logprobs: Tensor, allowed: Tensor | None
) -> None:
    rows, vocab = logits.shape
    portable = named_kernel() == "portable"
    tiling = _tiling(logits.device.index, vocab, portable, 2 if rows >= _MANY_ROWS else 3)
    address, stride = logits.data_ptr(), logits.stride(0)
    aligned = address % (4 * logits.element_size()) == 0 and (stride % 4 == 0 or rows == 1)
    values = (
        *(address, *(tensor.data_ptr() for tensor in (records, seen, tokens, logprobs))),
        *(0 if allowed is None else allowed.data_ptr(), stride),
        *(vocab, seen.shape[1], tiling.segment, int(aligned)),
    )
    function = jit.load(SAMPLE, logits.device.index)[sample_name(_DTYPES[logits.dtype], tiling.cached)]
    grid = (rows * tiling.blocks, 1, 1)
    describe = (
        f"sample on {logits.device}: {list(logits.shape)} {logits.dtype} strides {logits.stride()}, {tiling}".__str__
    )
    launch(function, layouts.SAMPLE, values, grid, _THREADS, tiling.shared, describe, cluster=tiling.blocks)


@cache
def _tiling(device: int, vocab: int, portable: bool, at_once: int) -> SampleTiling:
    """How rows of a vocabulary are divided among blocks, with ``at_once`` blocks on a multiprocessor.

    ``portable``: divide as on GPUs of compute capability 8.6 to 8.9.
    """
    function = layouts.SAMPLE.check(next(iter(jit.load(SAMPLE, device).values())))
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    max_shared = min(function.max_shared, 99 * 1024) if portable else function.max_shared
    return sample_tiling(vocab, max_shared, hopper and not portable, at_once)
