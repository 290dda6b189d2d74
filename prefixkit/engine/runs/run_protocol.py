"""What the loop asks of whatever grows sequences of the tree, from the logits after a prompt to its end."""

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
        key, step: Of the random numbers.
        history: What penalties look at.
        top: Likeliest tokens that the run looks at; 0 for none.
        process: Changes ``[vocab]`` logits first; None for nothing that does.
        grammar: Where the run is in its grammar, with all its tokens accepted; None where there is none.
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
        streams: Whether it is a :class:`StreamingRun`, else a :class:`SteppedRun`.
        state: The request that it is of.
        sequences: Its sequences in the tree.
        recomputing: Whether it was preempted: the last token of each sequence joins the tree once all before have KV.
    """

    streams: ClassVar[bool]
    state: RequestState
    sequences: list[Sequence]
    recomputing: bool

    @classmethod
    def start(cls, state: RequestState, tree: PrefixTree, call: Call) -> Self:
        """The request's next run, from a prompt whose logits are known; where that fails, the tree is unchanged."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def tokens_left(self) -> int:
        """Tokens of each sequence that may still join the tree: the last one never does."""

    @property
    def token_lists(self) -> list[list[int]]:
        """The tokens chosen so far, of each sequence."""

    @property
    def unpipelined(self) -> str | None:
        """Why its next step cannot be launched before the host has seen its last token; None if it can."""

    @property
    def done(self) -> bool:
        """Whether it has ended, and holds no sequence."""

    def row_sampling(self) -> RowSampling:
        """How its next tokens are chosen."""

    def lookahead_pages(self, tree: PrefixTree, tokens: int) -> int:
        """Pages that the next ``tokens`` tokens of each sequence may take."""

    def pages_to_resume(self, page_size: int, tokens: int) -> int:
        """The same once it is back in the tree, with the pages of the tokens that join the tree then."""

    def resume(self, sequences: list[Sequence]) -> None:
        """Go on with sequences of the prompt and all tokens chosen but the last."""

    def leave(self, store: KVStore, samples: list[Sample], retain: bool) -> None:
        """Take an ended run's sequences out of the tree; where ``retain``, their KV stays in the prefix cache."""

    def tokens_of_plain_batch(self, samples: list[Sample]) -> int:
        """Tokens that a plain batch would have computed for it."""


class StreamingRun(Run, Protocol):
    """A run whose tokens are those that are sampled, so that several may be accepted at once.

    Attributes:
        stop_filter: Tells when its last token may have ended it, beside :attr:`stop_token_ids`.
        stop_state: What the filter has noted of it.
    """

    stop_filter: StopFilter | None
    stop_state: int

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end it."""

    @property
    def by_token(self) -> bool:
        """Whether tokens have to be accepted one by one."""

    def hold(self, tokens: list[int], likely: Floats, stop_state: int) -> None:
        """Take tokens that do not end it; ``likely [tokens, 1 or 2]`` are their log-probabilities, and masses."""

    def accept(self, tokens: list[int], likely: Floats, on_token: Callable[[TokenEvent], None] | None) -> Sample | None:
        """Take tokens of which none but the last can end it; returns the sample if that did."""

    def run_out(self, tokens: list[int], likely: Floats, on_token: Callable[[TokenEvent], None] | None) -> Sample:
        """The same where no token could be sampled after these, by its grammar: it has ended."""


class SteppedRun(Run, Protocol):
    """A run that decides after each step how its sequences go on."""

    @classmethod
    def advance(cls, tree: PrefixTree, rows: Mapping[Self, list[int]], results: Results) -> list[tuple[Sequence, int]]:
        """A step of each run; those that are alike move together.

        Args:
            tree: Where the sequences live.
            rows: Of each run, the rows of the results that are its sequences'.
            results: Of the step.

        Returns:
            Which sequence is to be extended by which token.
        """

    def samples(self) -> list[Sample]:
        """What one that is done has found."""


def is_streaming(run: Run) -> TypeGuard[StreamingRun]:
    return run.streams


def is_stepped(run: Run) -> TypeGuard[SteppedRun]:
    return not run.streams
