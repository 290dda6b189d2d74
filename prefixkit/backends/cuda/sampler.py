"""Drawing on a GPU in steps that no graph holds: first tokens above all, for many samples from one prompt's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.backends.cuda.sampling import GpuSampler
from prefixkit.backends.cuda.sampling_records import MOST_VOCAB
from prefixkit.engine.request import SamplingParams
from prefixkit.engine.sample_run import draw_on_host


class GpuDrawer:
    """Draws tokens from logits on a GPU, those of ``sampling.draw``; keeps one sampler, for as many rows as it has met."""

    def __init__(self) -> None:
        self._sampler: GpuSampler | None = None

    def __call__(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        keys: NDArray[np.uint64],
        steps: NDArray[np.int64],
        histories: Sequence[NDArray[np.int32]],
    ) -> tuple[Tensor, Tensor]:
        """As ``sample_run.Draw``; token -1 where nothing can be drawn."""
        rows, vocab = logits.shape
        if vocab > MOST_VOCAB:
            return draw_on_host(logits, params, keys, steps, histories)
        sampler = self._sampler
        if sampler is None or sampler.rows < rows or sampler.vocab != vocab or sampler.device != logits.device:
            with torch.inference_mode(False):
                sampler = self._sampler = GpuSampler(rows, vocab, logits.device)
        sampler.load(slice(0, rows), params, keys, steps, histories)
        tokens, logprobs = sampler.draw(logits)
        return tokens.cpu(), logprobs.cpu()
