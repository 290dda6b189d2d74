"""Captured steps whose rows have grammars: what they may sample is filled in on the host while the model computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.gpu.staging import upload
from prefixkit.runners.batch import TokenMasks
from prefixkit.runners.graph_arrays import GraphArrays, Ring


class MaskedSteps:
    """The masks of a batch, which follow what its steps sample.

    The device never waits for a mask that is filled before the model's step ends: a step is launched before the tokens
    of the one before have reached the host.
    """

    def __init__(self, masks: TokenMasks) -> None:
        self._masks = masks
        self._last: tuple[Ring, int, int] | None = None  # where the tokens are that the masks have not seen

    def sample(self, arrays: GraphArrays, logits: Tensor, drawn: bool) -> None:
        """Sample from what a replay that is under way writes, on the current stream."""
        self._accept()
        (allowed,) = upload([self._masks.fill(logits.shape[1])], logits.device)
        arrays.sampler.sample(logits, drawn, allowed)

    def record(self, ring: Ring, index: int, rows: int) -> None:
        """What was sampled is on its way to the host."""
        self._last = ring, index, rows

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        """Go on with these of the rows."""
        self._accept()
        self._masks.select_rows(rows)

    def _accept(self) -> None:
        if self._last is not None:
            ring, index, rows = self._last
            self._masks.accept(ring.sampled(index, rows))
            self._last = None
