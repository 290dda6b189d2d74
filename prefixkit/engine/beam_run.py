"""One beam search in flight: moves of the search become forks and releases on the tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixkit.engine.beam import Beam, BeamSearch, advance, finished
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
        logits: ``[beams, vocab]`` those after each beam's last token.
        decode: Token ids to text.
    """

    state: RequestState
    search: BeamSearch
    sequences: list[Sequence]
    logits: Tensor
    decode: Callable[[list[int]], str] | None

    @classmethod
    def begin(cls, state: RequestState, sequence: Sequence, decode: Callable[[list[int]], str] | None) -> BeamRun:
        """Start the search from a prompt whose first logits are known."""
        params, logits = state.request.params, state.first_logits
        assert isinstance(params, BeamParams) and logits is not None
        return cls(state, BeamSearch(params), [sequence], logits[None], decode)

    @property
    def pages_left(self) -> int:
        """Pages that the search may still take: each beam a fresh one for each token to come."""
        params = self.search.params
        chosen = len(self.search.beams[0].tokens) if self.search.beams else 0
        return params.num_beams * max(0, params.max_new_tokens - 1 - chosen)

    def advance(self, tree: PrefixTree) -> tuple[list[tuple[Sequence, int]], list[Sample] | None]:
        """Take one step of the search, forking beams that go on in several ways and releasing those that go on in none.

        Returns:
            Which sequence is to be extended by which token, and the samples if the search is over.
        """
        self.search, move = advance(self.search, torch.log_softmax(self.logits, dim=-1))
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
