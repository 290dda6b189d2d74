"""One beam search in flight: each step of the search becomes forks and releases on the tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from prefixkit.engine.call import Call
from prefixkit.engine.request import BeamParams, Sample
from prefixkit.engine.request_state import RequestState
from prefixkit.engine.runs.beam import Beam, BeamSearch, advance, finished, num_candidates
from prefixkit.engine.runs.detokenizer import Decode
from prefixkit.engine.runs.run_protocol import RowSampling
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Results
from prefixkit.sampling.specification import GREEDY
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree, Sequence
from prefixkit.tree.rows import select

_NO_HISTORY = np.empty(0, np.int32)


@dataclass(eq=False)
class BeamRun:
    """A beam search that is under way: a sequence for each live beam (see ``SteppedRun``).

    Attributes:
        search: The beams and hypotheses so far.
        decode: Turns token ids into text.
        steps: Number of steps so far.
    """

    streams: ClassVar[bool] = False
    name: ClassVar[str] = "a beam"
    unpipelined: ClassVar[str | None] = "beam search"  # the forks of its beams decide what runs next

    state: RequestState
    sequences: list[Sequence]
    search: BeamSearch
    decode: Decode | None
    steps: int = 0
    recomputing: bool = False

    @classmethod
    def start(cls, state: RequestState, tree: PrefixTree, call: Call) -> BeamRun:
        search = BeamSearch(cast(BeamParams, state.request.params))
        return cls(state, tree.fork(state.sequence), search, call.detokenizer.decode)

    @property
    def tokens_left(self) -> int:
        return self.search.params.max_new_tokens - 1 - self.search.beams[0].length if self.search.beams else 0

    @property
    def token_lists(self) -> list[list[int]]:
        return [list(beam.tokens) for beam in self.search.beams]

    @property
    def done(self) -> bool:
        return self.search.done

    @property
    def top(self) -> int:
        """How many of the likeliest tokens of each beam a step reads."""
        return num_candidates(self.search.params)

    def row_sampling(self) -> RowSampling:
        return RowSampling(GREEDY, np.uint64(0), 0, _NO_HISTORY, top=self.top)

    def lookahead_pages(self, tree: PrefixTree, tokens: int) -> int:
        """Pages that the next ``tokens`` steps may take, unless every beam forks at each step."""
        most = pages_for(min(self.tokens_left, tokens), tree.page_size)
        return self.search.params.num_beams * (most + self.recomputing)

    def pages_to_resume(self, page_size: int, tokens: int) -> int:
        most = pages_for(min(self.tokens_left, tokens), page_size)
        return self.search.params.num_beams * most + len(self.search.beams)

    def resume(self, sequences: list[Sequence]) -> None:
        self.sequences, self.recomputing = sequences, True

    @classmethod
    def advance(
        cls, tree: PrefixTree, rows: Mapping[BeamRun, list[int]], results: Results
    ) -> list[tuple[Sequence, int]]:
        """A step of each search: beams with several continuations are forked, those with none are released."""
        alike: dict[tuple[BeamParams, int], list[BeamRun]] = {}
        for run in rows:
            alike.setdefault((run.search.params, len(run.sequences)), []).append(run)
        moves: dict[BeamRun, tuple[BeamSearch, tuple[int, ...]]] = {}
        for group in alike.values():
            own, top = [row for run in group for row in rows[run]], group[0].top
            tokens, logprobs = results.top_tokens[own, :top], results.top_logprobs[own, :top]
            moves |= zip(group, advance([run.search for run in group], tokens, logprobs), strict=True)
        grown = list[tuple[Sequence, int]]()
        for run in rows:
            run.search, parents = moves[run]
            run.steps += 1
            run.sequences = select(tree, run.sequences, parents)
            grown += zip(run.sequences, [beam.token for beam in run.search.beams], strict=True)
        return grown

    def samples(self) -> list[Sample]:
        return [self._sample(index, beam) for index, beam in enumerate(finished(self.search))]

    def _sample(self, index: int, beam: Beam) -> Sample:
        tokens = list(beam.tokens)
        stopped = tokens[-1] in (self.search.params.stop_token_ids or ())
        text = "" if self.decode is None else self.decode(tokens[:-1] if stopped else tokens)
        return Sample(
            prompt_index=self.state.request.prompt_index,
            index=index,
            tokens=tokens,
            logprobs=list(beam.logprobs),
            text=text,
            finish_reason="stop" if stopped else "length",
            score=beam.score,
        )

    def leave(self, store: KVStore, samples: list[Sample], retain: bool) -> None:
        """Do nothing: the search has released the sequences of all beams."""

    def tokens_of_plain_batch(self, samples: list[Sample]) -> int:
        return self.search.params.num_beams * (len(self.state.request.tokens) + self.steps - 1)
