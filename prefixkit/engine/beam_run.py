"""One beam search in flight: moves of the search become forks and releases on the tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.beam import Beam, BeamSearch, advance, finished, num_candidates
from prefixkit.engine.request import BeamParams, Sample
from prefixkit.engine.scheduler import RequestState
from prefixkit.tree.radix import PrefixTree, Sequence


@dataclass(eq=False)
class BeamRun:
    """A beam search that is under way.

    Attributes:
        state: Its prompt.
        search: Beams and hypotheses.
        sequences: The tree's sequence of each live beam.
        decode: Token ids to text.
    """

    state: RequestState
    search: BeamSearch
    sequences: list[Sequence]
    decode: Callable[[list[int]], str] | None
    key: ClassVar[np.uint64] = np.uint64(0)
    unpipelined: ClassVar[str | None] = "beam search"  # how its beams fork decides what runs next

    @classmethod
    def begin(cls, state: RequestState, sequence: Sequence, decode: Callable[[list[int]], str] | None) -> BeamRun:
        """Start the search from a prompt whose first logits are known."""
        params = state.request.params
        assert isinstance(params, BeamParams)
        return cls(state, BeamSearch(params), [sequence], decode)

    @property
    def top(self) -> int:
        """Likeliest tokens of each beam that a step looks at."""
        return num_candidates(self.search.params)

    @property
    def num_tokens(self) -> int:
        """Tokens that each beam has chosen."""
        return len(self.search.beams[0].tokens) if self.search.beams else 0

    @property
    def tokens_left(self) -> int:
        """Tokens of each beam that may still join the tree: the last one never does."""
        return max(0, self.search.params.max_new_tokens - 1 - self.num_tokens)

    def history(self) -> NDArray[np.int32]:
        return self.state.request.tokens

    @property
    def pages_left(self) -> int:
        """Pages that the search may still take: each beam a fresh one for each token to come."""
        return self.search.params.num_beams * self.tokens_left

    def advance(
        self, tree: PrefixTree, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> tuple[list[tuple[Sequence, int]], list[Sample] | None]:
        """Take one step of the search, forking beams that go on in several ways and releasing those that go on in none.

        Args:
            tree: Where the sequences live.
            tokens, logprobs: ``[beams, top]`` the likeliest tokens after each, best first.

        Returns:
            Which sequence is to be extended by which token, and the samples if the search is over.
        """
        self.search, move = advance(self.search, tokens, logprobs)
        num_children = [move.parents.count(parent) for parent in range(len(self.sequences))]
        handles: list[list[Sequence]] = []
        for sequence, count in zip(self.sequences, num_children, strict=True):
            handles.append([sequence, *(tree.fork(sequence, count - 1) if count > 1 else [])])
        for sequence, count in zip(self.sequences, num_children, strict=True):
            if count == 0:
                tree.release(sequence)
        self.sequences = [handles[parent].pop() for parent in move.parents]
        growth = list(zip(self.sequences, move.tokens, strict=True))
        return growth, self._samples() if self.search.done else None

    def _samples(self) -> list[Sample]:
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
