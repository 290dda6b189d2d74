"""Sampling on a device in steps that no graph holds: first tokens above all, for many samples from one prompt's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.ops.backend import Backend, Sampler
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.specification import SampleRows, sample_on_host


def sampler_of(backend: Backend) -> SampleRows:
    """What samples rows of logits: the backend's sampler, or the specification where it has none."""
    return sample_on_host if backend.sampling is None else DeviceSampler(backend)


class DeviceSampler:
    """Samples the tokens of the specification on a device; keeps one sampler, for as many rows as it has met."""

    def __init__(self, backend: Backend) -> None:
        assert backend.sampling is not None, "asked before"
        self._sampling = backend.sampling
        self._sampler: Sampler | None = None

    def __call__(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        keys: NDArray[np.uint64],
        steps: NDArray[np.int64],
        histories: Sequence[NDArray[np.int32]],
    ) -> tuple[Tensor, Tensor]:
        """As ``specification.sample_on_host``, but token -1 where nothing can be sampled."""
        rows, vocab = logits.shape
        if vocab > self._sampling.most_vocab:
            return sample_on_host(logits, params, keys, steps, histories)
        sampler = self._sampler
        if sampler is None or sampler.rows < rows or sampler.vocab != vocab or sampler.device != logits.device:
            with torch.inference_mode(False):
                sampler = self._sampler = self._sampling.make(rows, vocab, logits.device)
        sampler.load(slice(0, rows), params, keys, steps, histories)
        tokens, logprobs = sampler.draw(logits)
        return tokens.cpu(), logprobs.cpu()
