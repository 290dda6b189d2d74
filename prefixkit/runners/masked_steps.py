"""Captured steps whose rows have grammars: what they may sample is filled in on the host while the model computes."""

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
    """The steps of a batch, whose masks follow what they sample.

    The model's part of a step is launched before the tokens of the step before have reached the host, so the device
    waits only where masks take longer than that part.
    """

    def __init__(self, masks: TokenMasks, agreement: Agreement) -> None:
        self._masks, self._agreement = masks, agreement
        self._last: tuple[Ring, int, int] | None = None  # where the tokens are that the masks have not seen

    def sample(self, arrays: GraphArrays, logits: Tensor, drawn: bool) -> tuple[int, int]:
        """Sample from what a replay under way writes, on the current stream; returns the ring's index, and rows."""
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
        """Go on with these of the rows."""
        self._accept()
        self._masks.select_rows(rows)

    def _accept(self) -> None:
        if self._last is not None:
            ring, index, rows = self._last
            self._masks.accept(ring.sampled(index, rows))
            self._last = None


def masked_steps(output: GraphOutput, sampling: Sampling | None, agreement: Agreement) -> MaskedSteps | None:
    """Those of a batch; None where there are no grammars, or all is sampled from logits on the host."""
    if sampling is None or sampling.masks is None or output.uploads_batch:
        return None
    return MaskedSteps(sampling.masks, agreement)
