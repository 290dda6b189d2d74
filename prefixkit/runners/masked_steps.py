"""Captured steps of rows with grammars: the host fills the masks of allowed tokens while the model computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.agreement import Agreement
from prefixkit.attention.gpu.staging import upload
from prefixkit.runners.batch import Sampling, TokenMasks
from prefixkit.runners.capture import GraphOutput
from prefixkit.runners.graph_arrays import GraphArrays, Ring


class MaskedSteps:
    """The steps of a batch whose masks depend on the tokens sampled before.

    The model's part of a step is launched before the previous step's tokens have reached the host, so the device waits
    only if filling the masks takes longer than that part.
    """

    def __init__(self, masks: TokenMasks, agreement: Agreement) -> None:
        self._masks, self._agreement = masks, agreement
        self._last: tuple[Ring, int, int] | None = None  # location of tokens that the masks have not accepted

    def sample(self, arrays: GraphArrays, logits: Tensor, drawn: bool) -> tuple[int, int]:
        """Sample from the logits of a replay under way, on the current stream; returns index in the ring, and rows."""
        self._accept()
        (allowed,) = upload([self._masks.fill(logits.shape[1])], logits.device)
        arrays.sampler.sample(logits, drawn, allowed)
        sampled = arrays.sampler.sampled(len(logits), drawn)
        self._agreement.broadcast(*[one for one in sampled if one is not None])
        arrays.ring.copy(*sampled)
        index = arrays.ring.record(first=False)
        self._last = arrays.ring, index, len(logits)
        return index, len(logits)

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        """Continue with these rows alone."""
        self._accept()
        self._masks.select_rows(rows)

    def _accept(self) -> None:
        if self._last is not None:
            ring, index, rows = self._last
            self._masks.accept(ring.sampled(index, rows))
            self._last = None


def masked_steps(output: GraphOutput, sampling: Sampling | None, agreement: Agreement) -> MaskedSteps | None:
    """The masked steps of a batch; None without grammars, or if the host samples all tokens from logits."""
    if sampling is None or sampling.masks is None or output.uploads_batch:
        return None
    return MaskedSteps(sampling.masks, agreement)
