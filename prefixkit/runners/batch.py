"""One step of the loop as a value, its results, and the protocol of runners, which compute all tokens."""

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

# Maps ``[rows, vocab]`` float32 logits, which it may change, to the logits that tokens are sampled from.
Process = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens that run in a step, and the outputs wanted of them.

    Attributes:
        tree: A tree, and the query rows over it.
        tokens: ``[T]`` the token ids of the query rows.
        outputs: The outputs wanted of the rows.
        steps: Most steps that its sequences, and those that start after its prompts, may still take, this one included.
        states: The state slots that layers with a state read and write; None without such layers.
    """

    tree: StepTree
    tokens: NDArray[np.int32]
    outputs: Outputs
    steps: int = 1
    states: StateMoves | None = None

    @cached_property
    def decodes(self) -> bool:
        """Whether each query row is the last token of a separate leaf, after which a sequence continues."""
        outputs, nodes = self.outputs, self.tree.queries.node
        only_next = not (len(outputs.logits) or len(outputs.targets) or outputs.hidden is not None)
        return only_next and len(outputs.rows) == len(self.tokens) == len(nodes) and not self.tree.below[nodes].any()


def _none(*shape: int, dtype: type[np.generic] = np.int64) -> Any:
    return field(default_factory=lambda: np.empty(shape, dtype))


@dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs wanted of a step's query rows.

    Attributes:
        rows: ``[R]`` rows after which sequences continue: their next tokens are sampled.
        sampling: How these tokens are sampled; None: ``Runner.logits`` gives the logits of ``rows`` instead.
        logits: ``[P]`` further rows whose logits are wanted.
        targets, target_rows: ``[S]`` tokens whose log-probabilities are wanted, and the query row before each.
        hidden: ``[H]`` rows whose last hidden states are wanted.  The language-model head then does not run, and all
            other outputs are empty.  None: the outputs above are wanted.
    """

    rows: NDArray[np.int64] = _none(0)
    sampling: Sampling | None = None
    logits: NDArray[np.int64] = _none(0)
    targets: NDArray[np.int64] = _none(0)
    target_rows: NDArray[np.int64] = _none(0)
    hidden: NDArray[np.int64] | None = None


class TokenMasks(Protocol):
    """Masks of the tokens that the rows of a batch may sample next, where they depend on sampled tokens: grammars."""

    def accept(self, tokens: NDArray[np.int64]) -> None:
        """Accept the tokens that the rows have sampled, -1 for none."""

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        """Continue with these rows alone."""

    def fill(self, vocab: int) -> NDArray[np.int32]:
        """``[rows, ceil(vocab / 32)]`` allowed tokens, as the op ``sample`` reads them; valid until the next call."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """How the next tokens of a step's sequences are chosen.

    Attributes:
        batch: Sampling parameters of each sequence; beams have greedy ones.
        top: How many of the likeliest tokens of each greedy row are returned, for beam searches; 0 for none.
        process: Logits processors, called on the host once per step; None without any.
        drawn: Whether the probabilities with which tokens are sampled are wanted.
        masks: Masks of rows with a grammar; None without any.  The host fills them once per step while the model
            computes, after waiting for the tokens of the previous step.
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
        tokens: ``[R]`` int64 sampled tokens, -1 where the logits were broken, or a grammar allowed no token.
        logprobs: ``[R]`` float32, the log-softmax of the model's own logits at the tokens; NaN where the logits were
            broken, -inf where a grammar, or logits processors, allowed no token.
        drawn: ``[R, 2]`` float32, where wanted: the logarithm of the probability with which each token was sampled, and
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
        """``[R, 1]`` log-probabilities; or ``[R, 2]`` with masses, taken from ``drawn`` where ``rows [R]`` is True."""
        if self.drawn is None:
            return self.logprobs[:, None]
        plain = np.stack((self.logprobs, np.ones_like(self.logprobs)), axis=1)
        return np.where(rows[:, None], self.drawn, plain)


# Admitting other samples costs the host some 20 us per row: with this many rows, several steps of a small model.
LARGE = 512


@dataclass(frozen=True)
class Pace:
    """How far a runner runs ahead of the host, and when the host changes the batch.

    Attributes:
        ahead: Steps that may be under way while the host reads the tokens of the step before them.
        slack: Rows that have ended stay until they are one row in ``slack``: compacting costs the host some time.
        waited_for: While requests wait, a batch runs until one sample in ``waited_for`` has ended, or twice that share
            in batches of at least ``LARGE`` samples.
    """

    ahead: int = 1
    slack: int = sys.maxsize
    waited_for: int = sys.maxsize

    def makes_way(self, ended: int, rows: int) -> bool:
        """Whether to commit a batch of ``rows`` samples once ``ended`` of them have ended, so that others can start."""
        return ended > 0 and ended * self.waited_for >= (2 * rows if rows >= LARGE else rows)


STEP_BY_STEP = Pace()


class Runner(Protocol):
    """Launches the steps of the loop.  Only :meth:`read` and :meth:`sample` wait for a device."""

    @property
    def pace(self) -> Pace:
        """The pace of the present batch."""

    def counters(self) -> dict[str, float]:
        """Cumulative counters, keyed by field of the report."""

    @property
    def graph_bytes(self) -> int:
        """Bytes of GPU memory that graphs share."""

    @property
    def reads(self) -> tuple[int, int]:
        """Tokens whose KV one layer reads in the step launched last, with sharing and if each row read its KV alone.

        Both grow by one token per row and step, unless layers see only a part of their sequences (:attr:`sees_part`).
        """

    @property
    def sees_part(self) -> bool:
        """Whether some layers have a window or chunks."""

    @property
    def logits(self) -> Tensor:
        """``[R, vocab]`` logits of the step launched last, if it samples nothing; valid until the next step."""

    def drop_graphs(self) -> None:
        """Drop graphs: they read the model's weights at the addresses of the capture."""

    def start_call(self, state: object = None) -> None:
        """Start a call: the tensors that the model's steps read may have moved since the call before.

        ``state``: what the model computes with, if the caller has just read it.
        """

    def launch(self, batch: Batch) -> None:
        """Start the first step of a batch; it replaces the last batch, whose unread steps are discarded."""

    def repeat(self, tokens: Tensor | None = None) -> None:
        """Start another step of a batch that :attr:`~Batch.decodes`: each row runs the token that it sampled last.

        Each leaf must have reserved the pages of its later tokens.

        Args:
            tokens: ``[R]`` int64, the tokens that the rows run if the batch samples none.
        """

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        """Compact the batch to these of its rows, ascending."""

    def read(self) -> Results:
        """The results of the oldest unread step, for the rows that it had."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Results:
        """Choose next tokens from ``[R, vocab]`` float32 logits of an earlier step, without running a step."""


def launch_step(runner: Runner, tree: PrefixTree, batch: Batch, nodes: Sequence[Node]) -> None:
    """Launch a batch, whose ``batch.tree`` is a snapshot of ``tree``, and mark the batch's tokens computed.

    ``nodes`` are the nodes of the batch's query runs, in order.
    """
    queries, snapshot, states = batch.tree.queries, batch.tree.snapshot, tree.states
    if states is not None:
        outputs = batch.outputs
        last = np.cumsum(queries.end - queries.begin) - 1
        ends = np.isin(last, outputs.logits)
        goes_on = (np.isin(last, outputs.rows) | ends).tolist()
        batch = replace(batch, states=states.plan(nodes, queries.begin, queries.end, goes_on, ends.tolist()))
    runner.launch(batch)
    tree.mark_computed(nodes, np.maximum(queries.end, snapshot.computed[queries.node]))  # some tokens ran again
    if states is not None and batch.states is not None:
        states.commit(batch.states)
