"""Drawing tokens on a GPU in one launch that a CUDA graph can capture: the tokens of ``sampling.draw``, bit by bit.

All that the launch reads and writes keeps its address.  Nothing waits for the device, and drawing allocates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.staging import upload
from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.sampling_records import (
    ACTIVE,
    LAW_INTS,
    MOST_VOCAB,
    STEP,
    WARPS,
    Tiling,
    mask,
    records,
    tile,
    words,
)
from prefixkit.backends.cuda.units import KERNEL_VARIABLE, SAMPLE, sample_name
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.engine.request import SamplingParams

Ids = NDArray[np.integer[Any]]

_THREADS = 32 * WARPS
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class GpuSampler:
    """Parameters and state of up to ``rows`` sequences that are drawn together; rows are inactive until loaded.

    A row that holds NaN or +inf, or no finite logit, or whose scores leave float32, gets token -1 and log-probability NaN,
    where the CPU raises.

    Attributes:
        rows, vocab: Most rows, and the length of each.
        tokens: ``[rows]`` int64, what was drawn last; rows that are not active keep theirs.
        logprobs: ``[rows]`` float32, the log-softmax of the untouched logits at the token.
        steps: ``[rows]`` int32 view, how many tokens a row has drawn: the counter of its random stream.  A draw adds 1.
        active: ``[rows]`` int32 view, 0 for rows that draws leave alone; kernels may write it.
        seen: ``[rows, ceil(vocab / 32)]`` int32, bit ``t % 32`` of word ``t // 32`` says that the sequence holds token ``t``.
            Kept for every row, looked at where there is a repetition penalty.

    Raises:
        ValueError: a size below 1, or a vocabulary above 2**20.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device | str) -> None:
        if rows < 1 or not 1 <= vocab <= MOST_VOCAB:
            raise ValueError(
                f"a sampler needs at least 1 row and 1 to {MOST_VOCAB} tokens, got {rows} rows of {vocab}; "
                "draw larger ones with sampling.draw"
            )
        self.rows, self.vocab = rows, vocab
        self._laws = torch.zeros(rows, LAW_INTS, dtype=torch.int32, device=device)
        self.device = self._laws.device
        self.steps, self.active = self._laws[:, STEP], self._laws[:, ACTIVE]
        self.seen = torch.zeros(rows, words(vocab), dtype=torch.int32, device=self.device)
        self.tokens = torch.full((rows,), -1, dtype=torch.int64, device=self.device)
        self.logprobs = torch.full((rows,), torch.nan, device=self.device)
        self._functions = jit.load(SAMPLE, self.device.index)
        self._tiling = self._tile()

    def _tile(self) -> Tiling:
        """How rows are dealt out on this GPU."""
        function = next(iter(self._functions.values()))
        layouts.SAMPLE.check(function)
        hopper = torch.cuda.get_device_capability(self.device) >= (9, 0)
        portable = os.environ.get(KERNEL_VARIABLE, "") == "portable"
        # What GPUs of compute capability 8.6 to 8.9 have, where the portable way is asked for.
        room = min(function.max_shared, 99 * 1024) if portable else function.max_shared
        return tile(self.vocab, room, hopper and not portable)

    def load(
        self,
        rows: slice | Sequence[int] | Ids,
        params: Sequence[SamplingParams],
        keys: NDArray[np.uint64],
        steps: Ids,
        histories: Sequence[Ids] | None = None,
    ) -> None:
        """Give rows their parameters and make them active: one copy on the current stream, for which the host does not wait.

        Args:
            rows: Which, each once.
            params: One for each of them.
            keys: ``[n]`` from ``rng.sample_key``.
            steps: ``[n]`` how many tokens each has drawn before, from 0 to 2**31 - 1.
            histories: For each the tokens its sequence holds, prompt included; only the repetition penalty needs them.

        Raises:
            ValueError: lengths disagree, a row does not exist, or a penalised row has no history.
        """
        number = np.arange(self.rows)[rows] if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64).ravel()
        self._check(number, params, keys, steps, histories)
        if not len(number):
            return
        penalised = [i for i, law in enumerate(params) if law.repetition_penalty != 1]
        masks = [mask(histories[i], self.vocab) for i in penalised] if histories is not None else []
        arrays: list[NDArray[np.signedinteger]] = [
            number,
            records(params, np.asarray(keys, dtype=np.uint64), np.asarray(steps)),
        ]
        if masks:
            arrays += [number[penalised], np.stack(masks)]
        there = upload(arrays, self.device)
        self._laws.index_copy_(0, there[0], there[1])
        if masks:
            self.seen.index_copy_(0, there[2], there[3])

    def _check(
        self,
        rows: Ids,
        params: Sequence[SamplingParams],
        keys: NDArray[np.uint64],
        steps: Ids,
        histories: Sequence[Ids] | None,
    ) -> None:
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.rows and len(np.unique(rows)) == len(rows)):
            raise ValueError(f"rows must be different and from 0 to {self.rows - 1}, got {rows.tolist()}")
        sizes = {"params": len(params), "keys": len(keys), "steps": len(steps)}
        if histories is not None:
            sizes["histories"] = len(histories)
        for name, size in sizes.items():
            if size != len(rows):
                raise ValueError(f"{name} must have one entry for each of the {len(rows)} rows, got {size}")
        if histories is None:
            for row, law in zip(rows, params, strict=True):
                if law.repetition_penalty != 1:
                    raise ValueError(
                        f"row {row} asks for repetition_penalty={law.repetition_penalty}, which needs the tokens of its "
                        "sequence; pass histories, or use repetition_penalty=1.0"
                    )

    def keep(self, index: Tensor) -> None:
        """Move rows to the front: row ``i`` becomes what row ``index[i]`` was; those behind become inactive.

        Args:
            index: ``[n]`` int64 on the device, n at most ``rows``; a row may be taken more than once.
        """
        count = len(index)
        if index.ndim != 1 or count > self.rows or index.dtype != torch.int64 or index.device != self.device:
            raise ValueError(
                f"index must be at most {self.rows} int64 row numbers on {self.device}, got {list(index.shape)} "
                f"{index.dtype} on {index.device}"
            )
        for state in (self._laws, self.seen, self.tokens, self.logprobs):
            state[:count] = state.index_select(0, index)
        self.active[count:] = 0

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token for every active row of the first ``n``, on the current stream; can be captured in a CUDA graph.

        Args:
            logits: ``[n, vocab]`` float32, bfloat16 or float16, n at most ``rows``; stride 1 over the vocabulary.

        Returns:
            ``tokens[:n]`` and ``logprobs[:n]``, always at the same place.

        Raises:
            ValueError, TypeError: the logits do not fit.
        """
        if logits.dtype not in _DTYPES:
            raise TypeError(
                f"logits must be float32, bfloat16 or float16, got {logits.dtype}; convert them with .float()"
            )
        if logits.ndim != 2 or logits.shape[1] != self.vocab or logits.shape[0] > self.rows:
            raise ValueError(
                f"logits must have shape [at most {self.rows}, {self.vocab}], got {list(logits.shape)}; "
                "make a sampler for more rows, or for this vocabulary"
            )
        if logits.device != self.device or (logits.stride(1) != 1 and self.vocab > 1):
            raise ValueError(
                f"logits must be on {self.device} with stride 1 over the vocabulary, got strides {logits.stride()} on "
                f"{logits.device}; use .to() or .contiguous()"
            )
        count, tiling = len(logits), self._tiling
        address, stride = logits.data_ptr(), logits.stride(0)
        aligned = address % (4 * logits.element_size()) == 0 and (stride % 4 == 0 or count == 1)
        state = (self._laws, self.seen, self.tokens, self.logprobs)
        values = (
            *(address, *(tensor.data_ptr() for tensor in state), stride),
            *(self.vocab, self.seen.shape[1], tiling.segment, int(aligned)),
        )
        function = self._functions[sample_name(_DTYPES[logits.dtype], tiling.cached)]
        grid = (count * tiling.blocks, 1, 1)
        say = (
            f"sample on {self.device}: {list(logits.shape)} {logits.dtype} strides {logits.stride()}, {tiling}".__str__
        )
        launch(function, layouts.SAMPLE, values, grid, _THREADS, tiling.shared, say, cluster=tiling.blocks)
        return self.tokens[:count], self.logprobs[:count]
