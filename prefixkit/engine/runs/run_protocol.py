"""The protocols of runs: what the loop calls on a sample or a beam search, from the prompt's logits to the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, Protocol, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.call import Call
from prefixkit.engine.request import Sample, TokenEvent
from prefixkit.engine.request_state import RequestState
from prefixkit.engine.runs.grammar_masks import GrammarPlace
from prefixkit.engine.runs.stop_filter import StopFilter
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Results
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.radix import PrefixTree, Sequence

Floats = NDArray[np.float32]


class RowSampling(NamedTuple):
    """How the next token of each of a run's sequences is chosen.

    Attributes:
        params: Temperature, filters and penalty.
        key, step: Key and counter of the random numbers.
        history: The tokens to which penalties apply.
        top: How many of the likeliest tokens the run reads; 0 for none.
        process: Changes ``[vocab]`` logits before sampling; None: the logits stay as they are.
        grammar: The run's grammar state, after all its tokens; None without a grammar.
    """

    params: SamplingParams
    key: np.uint64
    step: int
    history: NDArray[np.int32]
    top: int = 0
    process: Callable[[Tensor], Tensor] | None = None
    grammar: GrammarPlace | None = None


class Run(Protocol):
    """Something that grows sequences: a sample, a beam search.

    Attributes:
        streams: Whether the run is a :class:`StreamingRun`; else it is a :class:`SteppedRun`.
        state: The request of the run.
        sequences: Its sequences in the tree.
        recomputing: Whether the run resumes after preemption: the last token of each sequence joins the tree once all
            tokens before it have KV.
    """

    streams: ClassVar[bool]
    state: RequestState
    sequences: list[Sequence]
    recomputing: bool

    @classmethod
    def start(cls, state: RequestState, tree: PrefixTree, call: Call) -> Self:
        """Start the request's next run from a prompt whose logits are known; an error leaves the tree unchanged."""

    @property
    def name(self) -> str:
        """The name of the run in messages."""

    @property
    def tokens_left(self) -> int:
        """Tokens of each sequence that may still join the tree: the last one never does."""

    @property
    def token_lists(self) -> list[list[int]]:
        """The tokens chosen so far for each sequence."""

    @property
    def unpipelined(self) -> str | None:
        """Why the next step cannot be launched before the host has read the last token; None if it can."""

    @property
    def done(self) -> bool:
        """Whether the run has ended, and holds no sequence."""

    def row_sampling(self) -> RowSampling:
        """How the run's next tokens are chosen."""

    def lookahead_pages(self, tree: PrefixTree, tokens: int) -> int:
        """Pages that the next ``tokens`` tokens of each sequence may take."""

    def pages_to_resume(self, page_size: int, tokens: int) -> int:
        """The same pages once the run has resumed, and the pages of tokens that join the tree on resuming."""

    def resume(self, sequences: list[Sequence]) -> None:
        """Resume with sequences of the prompt and all chosen tokens but the last."""

    def leave(self, store: KVStore, samples: list[Sample], retain: bool) -> None:
        """Remove an ended run's sequences from the tree; with ``retain``, their KV stays in the prefix cache."""

    def tokens_of_plain_batch(self, samples: list[Sample]) -> int:
        """Tokens that a plain batch would have computed for the run."""


class StreamingRun(Run, Protocol):
    """A run that takes every sampled token as its next, so that several may be accepted at once.

    Attributes:
        stop_filter: Finds last tokens, other than :attr:`stop_token_ids`, that may have ended the run.
        stop_state: The filter's state for the run.
    """

    stop_filter: StopFilter | None
    stop_state: int

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the run."""

    @property
    def by_token(self) -> bool:
        """Whether tokens must be accepted one by one."""

    def hold(self, tokens: list[int], likely: Floats, stop_state: int) -> None:
        """Take tokens that do not end the run; ``likely [tokens, 1 or 2]``: their log-probabilities, and masses."""

    def accept(self, tokens: list[int], likely: Floats, on_token: Callable[[TokenEvent], None] | None) -> Sample | None:
        """Take tokens of which only the last can end the run; returns the sample if it did."""

    def run_out(self, tokens: list[int], likely: Floats, on_token: Callable[[TokenEvent], None] | None) -> Sample:
        """Take tokens after which the run has ended, because no token that is allowed could be sampled."""


class SteppedRun(Run, Protocol):
    """A run that decides after each step how its sequences continue."""

    @classmethod
    def advance(cls, tree: PrefixTree, rows: Mapping[Self, list[int]], results: Results) -> list[tuple[Sequence, int]]:
        """Advance each run by a step; runs that are alike advance together.

        Args:
            tree: Holds the sequences.
            rows: For each run, the rows of the results that belong to its sequences.
            results: The results of the step.

        Returns:
            The sequences to be extended, each with its token.
        """

    def samples(self) -> list[Sample]:
        """The samples of a run that is done."""


def is_streaming(run: Run) -> TypeGuard[StreamingRun]:
    return run.streams


def is_stepped(run: Run) -> TypeGuard[SteppedRun]:
    return not run.streams
