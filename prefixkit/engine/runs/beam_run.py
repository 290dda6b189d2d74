"""One beam search in flight: moves of the search become forks and releases on the tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.request import BeamParams, Sample
from prefixkit.engine.runs.beam import Beam, BeamMove, BeamSearch, advance, finished, num_candidates
from prefixkit.engine.scheduler import RequestState
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree, Sequence
from prefixkit.tree.rows import select


@dataclass(eq=False)
class BeamRun:
    """A beam search that is under way.

    Attributes:
        state: Its prompt.
        search: Beams and hypotheses.
        sequences: The tree's sequence of each live beam.
        decode: Token ids to text.
        steps: Steps of the search so far.
        restores: Whether it was preempted: the last token of each beam joins the tree once those before it have KV.
    """

    state: RequestState
    search: BeamSearch
    sequences: list[Sequence]
    decode: Callable[[list[int]], str] | None
    steps: int = 0
    restores: bool = False
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
    def tokens_left(self) -> int:
        """Tokens of each beam that may still join the tree: the last one never does."""
        return self.search.params.max_new_tokens - 1 - self.search.beams[0].length if self.search.beams else 0

    @property
    def token_lists(self) -> list[list[int]]:
        """The tokens chosen so far, of each live beam."""
        return [list(beam.tokens) for beam in self.search.beams]

    def resume(self, sequences: list[Sequence]) -> None:
        """Go on with sequences of the prompt and all tokens but the last, of each beam."""
        self.sequences, self.restores = sequences, True

    def growth(self, tree: PrefixTree, tokens: int) -> int:
        """Pages that its next steps may take, so many if it gets as far, if not every beam forks at each of them."""
        most = pages_for(min(self.tokens_left, tokens), tree.page_size)
        return self.search.params.num_beams * (most + self.restores)

    def move(self, tree: PrefixTree, search: BeamSearch, move: BeamMove) -> list[tuple[Sequence, int]]:
        """Go on as the search does: fork beams that go on in several ways, release those that go on in none.

        Returns:
            Which sequence is to be extended by which token.
        """
        self.search, self.steps = search, self.steps + 1
        self.sequences = select(tree, self.sequences, move.parents)
        return list(zip(self.sequences, move.tokens, strict=True))

    def samples(self) -> list[Sample]:
        """What a search that is done has found."""
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


def advance_beams(
    tree: PrefixTree,
    rows: Mapping[BeamRun, list[int]],
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float32],
) -> list[tuple[Sequence, int]]:
    """A step of each search.

    Args:
        tree: Where the sequences live.
        rows: Of each search, the row of each beam.
        tokens, logprobs: ``[rows, top]`` the likeliest tokens, best first.

    Returns:
        Which sequence is to be extended by which token.
    """
    alike: dict[tuple[BeamParams, int], list[BeamRun]] = {}
    for run in rows:
        alike.setdefault((run.search.params, len(run.sequences)), []).append(run)
    moves: dict[BeamRun, tuple[BeamSearch, BeamMove]] = {}
    for group in alike.values():
        own, top = [row for run in group for row in rows[run]], group[0].top
        moves |= zip(group, advance([run.search for run in group], tokens[own, :top], logprobs[own, :top]), strict=True)
    return [grow for run in rows for grow in run.move(tree, *moves[run])]
