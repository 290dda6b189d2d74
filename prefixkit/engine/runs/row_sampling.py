"""How the next token of a sequence is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.sampling.params import SamplingParams


class RowSampling(NamedTuple):
    """How the next token of each of a run's sequences is chosen.

    Attributes:
        params: Temperature, filters and penalty.
        key, step: Of the random numbers.
        history: What penalties look at.
        top: Likeliest tokens that the run looks at; 0 for none.
        process: Changes ``[vocab]`` logits first; None for nothing that does.
    """

    params: SamplingParams
    key: np.uint64
    step: int
    history: NDArray[np.int32]
    top: int = 0
    process: Callable[[Tensor], Tensor] | None = None
