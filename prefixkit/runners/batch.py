"""One step of the loop as a value, its results, and what runs it: the one way in which all tokens are computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.queries import StepTree
from prefixkit.sampling.specification import SamplingBatch
from prefixkit.tree.node import Node
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.state_slots import StateMoves

# From ``[rows, vocab]`` float32 logits, which it may change, to those that tokens are sampled from.
Process = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """Which tokens run in a step, and what comes of them.

    Attributes:
        tree: A tree, and the tokens that run as its query rows.
        tokens: ``[T]`` their ids.
        outputs: What the rows give.
        steps: Steps that its sequences, and those that start after its prompts, may still take, this one included.
        states: What layers that keep a state do; None where there are none.
    """

    tree: StepTree
    tokens: NDArray[np.int32]
    outputs: Outputs
    steps: int = 1
    states: StateMoves | None = None

    @cached_property
    def decodes(self) -> bool:
        """Whether each query row is the last token of a leaf of its own, after which a sequence continues."""
        outputs, nodes = self.outputs, self.tree.queries.node
        only_next = not (len(outputs.logits) or len(outputs.targets) or outputs.hidden is not None)
        return only_next and len(outputs.rows) == len(self.tokens) == len(nodes) and not self.tree.below[nodes].any()


def _none(*shape: int, dtype: type[np.generic] = np.int64) -> Any:
    return field(default_factory=lambda: np.empty(shape, dtype))


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the query rows of a step give.

    Attributes:
        rows: ``[R]`` rows after which sequences go on: their next tokens are sampled.
        sampling: How; None: the logits of ``rows`` are wanted instead, as ``Runner.logits``.
        logits: ``[P]`` rows whose logits are wanted besides.
        targets, target_rows: ``[S]`` tokens whose log-probabilities are wanted, and the query row before each.
        hidden: ``[H]`` rows whose last hidden states are wanted, before the language-model head, which does not run:
            no other output is asked for beside them.  None: those above are.
    """

    rows: NDArray[np.int64] = _none(0)
    sampling: Sampling | None = None
    logits: NDArray[np.int64] = _none(0)
    targets: NDArray[np.int64] = _none(0)
    target_rows: NDArray[np.int64] = _none(0)
    hidden: NDArray[np.int64] | None = None


class TokenMasks(Protocol):
    """Which tokens the rows of a batch may sample next, where that follows from those sampled before: grammars."""

    def accept(self, tokens: NDArray[np.int64]) -> None:
        """The rows have sampled these, -1 for none."""

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        """Go on with these of the rows."""

    def fill(self, vocab: int) -> NDArray[np.int32]:
        """``[rows, ceil(vocab / 32)]`` what each may sample now, as the op ``sample`` reads it, until the next call."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """How the next tokens of a step's sequences are chosen.

    Attributes:
        batch: Sampling parameters of each sequence; greedy ones of a beam.
        top: Likeliest tokens that come back of each greedy row, for beam searches; 0 for none.
        process: Logits processors, if there are any: called once for each step, on the host.
        drawn: Whether it is wanted with which probability tokens are sampled.
        masks: What rows with a grammar may sample, if there are any: asked on the host once a step, while the model
            computes, for which the host waits for the tokens of the step before.
    """

    batch: SamplingBatch
    top: int = 0
    process: Process | None = None
    drawn: bool = False
    masks: TokenMasks | None = None


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a step, on the host except for tensors.

    Attributes:
        tokens: ``[R]`` int64 sampled tokens, -1 where the logits were broken, or a grammar allowed none.
        logprobs: ``[R]`` float32, the log-softmax of the model's own logits at them; NaN where the logits were broken,
            -inf where a grammar, or logits processors, allowed none.
        drawn: ``[R, 2]`` float32, where it is wanted: the logarithm of the probability with which each was sampled, and
            the mass that the filters left.
        top_tokens: ``[R, top]`` int64 the likeliest tokens of each greedy row, best first.
        top_logprobs: ``[R, top]`` float32 likewise.
        logits: ``[P, vocab]`` float32, where they are wanted.
        target_logprobs: ``[S]`` float32, where they are wanted.
        target_greedy: ``[S]`` bool, whether greedy decoding takes the target.
        hidden: ``[H, hidden_size]``, where they are wanted, in the dtype of the model.
    """

    tokens: NDArray[np.int64] = _none(0)
    logprobs: NDArray[np.float32] = _none(0, dtype=np.float32)
    top_tokens: NDArray[np.int64] = _none(0, 0)
    top_logprobs: NDArray[np.float32] = _none(0, 0, dtype=np.float32)
    drawn: NDArray[np.float32] | None = None
    logits: Tensor | None = None
    target_logprobs: Tensor | None = None
    target_greedy: Tensor | None = None
    hidden: Tensor | None = None

    def likely(self, rows: NDArray[np.bool_]) -> NDArray[np.float32]:
        """``[R, 1]`` log-probabilities; or ``[R, 2]`` and masses, which are those ``drawn`` for some ``rows [R]``."""
        if self.drawn is None:
            return self.logprobs[:, None]
        plain = np.stack((self.logprobs, np.ones_like(self.logprobs)), axis=1)
        return np.where(rows[:, None], self.drawn, plain)


# To take others in costs the host some 20 us a row: of this number of rows, several steps of a small model.
LARGE = 512


@dataclass(frozen=True)
class Pace:
    """How far a runner goes before the host changes what it runs.

    Attributes:
        ahead: Steps that may be under way while the host looks at the tokens of the one before.
        slack: Rows that have ended stay until they are one in ``slack``: compacting costs the host a little.
        waited_for: Where requests wait, a batch runs on until one sample in ``waited_for`` has ended, or of
            ``LARGE`` and more samples twice that share.
    """

    ahead: int = 1
    slack: int = sys.maxsize
    waited_for: int = sys.maxsize

    def makes_way(self, ended: int, rows: int) -> bool:
        """Whether a batch of ``rows`` samples, of which some have ended, makes way for what waits."""
        return ended > 0 and ended * self.waited_for >= (2 * rows if rows >= LARGE else rows)


STEP_BY_STEP = Pace()


class Runner(Protocol):
    """Launches the steps of the loop.  Only :meth:`read` and :meth:`sample` wait for a device."""

    @property
    def pace(self) -> Pace:
        """That of the batch at hand."""

    def counters(self) -> dict[str, float]:
        """Cumulative counters, by the fields of a report."""

    @property
    def graph_bytes(self) -> int:
        """GPU memory that graphs share."""

    @property
    def reads(self) -> tuple[int, int]:
        """Token KVs that one layer reads in the step launched last, and would read for each row apart.

        Both grow by a token for each row and step, unless layers see a part of their sequences (:attr:`sees_part`).
        """

    @property
    def sees_part(self) -> bool:
        """Whether some layers have a window or chunks."""

    @property
    def logits(self) -> Tensor:
        """``[R, vocab]`` what the step launched last gave, where nothing is sampled; valid until the next step."""

    def drop_graphs(self) -> None:
        """Drop graphs, which read the model's weights where they were captured."""

    def start_call(self) -> None:
        """A call starts: what the model's steps read may lie elsewhere than in the call before."""

    def launch(self, batch: Batch) -> None:
        """Start the first step of a batch, in place of the last batch, whose unread steps are discarded."""

    def repeat(self, tokens: Tensor | None = None) -> None:
        """Start another step of a batch that :attr:`~Batch.decodes`: each row runs the token sampled before.

        Each leaf has to hold the pages of its tokens to come.

        Args:
            tokens: ``[R]`` int64, what the rows run where nothing is sampled.
        """

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        """Compact the batch to these of its rows, ascending."""

    def read(self) -> Results:
        """The results of the oldest step that was not read, for the rows that it had."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Results:
        """Choose next tokens from ``[R, vocab]`` float32 logits that an earlier step gave, without a step."""


def launch_step(runner: Runner, tree: PrefixTree, batch: Batch, nodes: Sequence[Node]) -> None:
    """Launch a batch over the tree that ``batch.tree`` is a snapshot of, and mark its tokens computed.

    ``nodes`` are those of its query runs, in order.
    """
    queries, snapshot, states = batch.tree.queries, batch.tree.snapshot, tree.states
    if states is not None:
        outputs = batch.outputs
        last = np.cumsum(queries.end - queries.begin) - 1
        ends = np.isin(last, outputs.logits)
        goes_on = (np.isin(last, outputs.rows) | ends).tolist()
        batch = replace(batch, states=states.plan(nodes, queries.begin, queries.end, goes_on, ends.tolist()))
    runner.launch(batch)
    tree.mark_computed(nodes, np.maximum(queries.end, snapshot.computed[queries.node]))  # some ran once more
    if states is not None and batch.states is not None:
        states.commit(batch.states)
