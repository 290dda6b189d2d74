"""Decode steps of many rows, one after the other, over arrays that stay: what a loop needs of a decoder."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.decode_batch import DecodeBatch
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.step import Step
from prefixkit.runners.decode_tree import DecodeTree
from prefixkit.sampling.specification import SamplingBatch

Sampled = tuple[NDArray[np.int64], NDArray[np.float32]]


class CannotDecode(RuntimeError):
    """A decoder cannot run this model's steps; nothing has run, and steps must be run without it."""


class Decoder(Protocol):
    """Runs decode steps.  Only :meth:`read` waits for a device.

    Attributes:
        planned: The plan of the batch at hand.
        captures, seconds_capturing, graph_bytes: CUDA graphs captured so far, what that took, and GPU memory that they
            share.
        stale: Whether what steps read lies elsewhere by now; then ``keep`` all rows before the next one.  Reading it
            changes nothing.
    """

    planned: StepPlan
    captures: int
    seconds_capturing: float

    @property
    def graph_bytes(self) -> int: ...

    @property
    def stale(self) -> bool: ...

    def begin(self, batch: DecodeBatch, sampling: SamplingBatch, last: NDArray[np.int64]) -> None:
        """Take a batch in place of the last one, whose unread steps are forgotten.

        Args:
            batch: The tree and its leaves.
            sampling: How their rows are sampled.
            last: ``[rows]`` the last token of each, whose KV is yet to be computed.

        Raises:
            CannotDecode: the model's steps cannot be run like this.
        """

    def keep(self, batch: DecodeBatch, rows: NDArray[np.intp]) -> None:
        """Go on with ``rows`` of the batch, ascending; ``batch`` is what they are by now."""

    def step(self) -> None:
        """Start a step: every row's last token runs, and its next one is sampled."""

    def read(self) -> Sampled:
        """``[rows]`` the tokens and log-probabilities of the oldest step that was not read, of the rows it had; -1
        where the logits were broken."""


def decode_step(batch: DecodeBatch, tree: DecodeTree, wanted: Tensor, planned: StepPlan) -> Step:
    """The step of the rows ``wanted``, the first ones, over a decode tree's arrays; ``length`` is that of the batch."""
    rows = len(wanted)
    return Step(
        tokens=tree.tokens[:rows],
        positions=tree.positions[:rows],
        slots=tree.slots[:rows],
        logit_rows=wanted,
        length=batch.snapshot.length,
        kv_tokens_unshared=int((batch.snapshot.start + batch.snapshot.length)[batch.leaf].sum()),
        planned=planned,
    )
