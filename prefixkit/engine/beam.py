"""Beam search as pure functions on scores: no model, no tree.

The rules are those of transformers' beam search, and its float32 arithmetic in its order, so that sequences and scores
agree.  At each step the live beams' continuations are ranked by summed log-probability, and the best
``num_beams * max(2, 1 + number of stop tokens)`` are candidates: enough that ``num_beams`` of them go on even if
every beam takes every stop token.  A candidate that ends is a hypothesis only if it is among the best ``num_beams``.

Two things differ.  Where transformers marks what does not exist by a score of -1e9, here it does not exist: the first
step has one beam, and a step with fewer possible continuations than beams leaves fewer beams.  Equal hypotheses rank
in the order in which they were found.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.request import BeamParams

log = logging.getLogger("prefixkit")


@dataclass(frozen=True)
class Beam:
    """A sequence of chosen tokens.

    Attributes:
        tokens: The tokens after the prompt; a finished one includes its stop token.
        logprobs: The log-probability of each.
        score: Their sum; for a hypothesis, divided by ``length ** length_penalty``.  A float32 value.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: float = 0.0


@dataclass(frozen=True)
class BeamSearch:
    """The search over one prompt, after some steps.

    Attributes:
        params: What was asked for.
        beams: The live beams, best first; before the first step one, the prompt; none once the search is over.
        hypotheses: The best finished sequences so far, best first, at most ``num_beams``.
    """

    params: BeamParams
    beams: tuple[Beam, ...] = (Beam(),)
    hypotheses: tuple[Beam, ...] = ()

    @property
    def done(self) -> bool:
        return not self.beams


@dataclass(frozen=True)
class BeamMove:
    """What a step did: new beam ``i`` is old beam ``parents[i]`` followed by ``tokens[i]``.

    A parent that occurs twice is forked, one that does not occur is released.  Empty once the search is over.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Candidate:
    parent: int
    token: int
    logprob: float
    total: float  # summed log-probability
    score: float  # total over length ** length_penalty


def num_candidates(params: BeamParams) -> int:
    """Continuations that a step ranks: enough that ``num_beams`` of them go on even if every beam may stop."""
    return max(2, 1 + len(params.stop_token_ids or ())) * params.num_beams


def advance(state: BeamSearch, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> tuple[BeamSearch, BeamMove]:
    """One step of the search.

    Args:
        state: A search that is not done.
        tokens: ``[len(state.beams), k]`` the likeliest tokens after each beam: :func:`num_candidates`, or the whole
            vocabulary if that is smaller.
        logprobs: ``[len(state.beams), k]`` float32, their log-softmax; ``-inf`` forbids a token.

    Returns:
        The next state, and how its beams follow from the old ones.

    Raises:
        ValueError: the search is over, a shape or dtype does not fit, or a log-probability is NaN.
    """
    params, length = state.params, 1 + _length(state)
    candidates = _best_candidates(state, tokens, logprobs, length)
    ends = [length == params.max_new_tokens or one.token in (params.stop_token_ids or ()) for one in candidates]
    goes_on = [one for one, end in zip(candidates, ends, strict=True) if not end][: params.num_beams]
    ended = [one for one, end in zip(candidates[: params.num_beams], ends, strict=False) if end]

    found = [_extended(state, one, one.score) for one in ended]
    hypotheses = tuple(sorted((*state.hypotheses, *found), key=lambda beam: -beam.score)[: params.num_beams])
    if not goes_on or _decided(params, hypotheses, goes_on[0].total, length):
        goes_on = []
    beams = tuple(_extended(state, one, one.total) for one in goes_on)
    move = BeamMove(tuple(one.parent for one in goes_on), tuple(one.token for one in goes_on))
    return BeamSearch(params, beams, hypotheses), move


def finished(state: BeamSearch, num_return_sequences: int | None = None) -> list[Beam]:
    """The best finished sequences, best first.

    Fewer than asked for come back only if the model allowed fewer, by forbidding (``-inf``) everything else.

    Args:
        state: A search that is done.
        num_return_sequences: How many, at most ``num_beams``; ``None`` for the number in ``state.params``.

    Raises:
        ValueError: the search still runs, or more are asked for than there are beams.
    """
    count = state.params.num_return_sequences if num_return_sequences is None else num_return_sequences
    if not state.done:
        raise ValueError(f"the search still runs {len(state.beams)} beams; advance it until done")
    if not 1 <= count <= state.params.num_beams:
        raise ValueError(f"num_return_sequences must be from 1 to num_beams={state.params.num_beams}, got {count}")
    if len(state.hypotheses) < count:
        log.warning("beam search: %d of %d sequences found, the model forbids all others", len(state.hypotheses), count)
    return list(state.hypotheses[:count])


def _length(state: BeamSearch) -> int:
    """Tokens chosen so far."""
    return len(state.beams[0].tokens) if state.beams else 0


def _best_candidates(
    state: BeamSearch, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], length: int
) -> list[_Candidate]:
    """The best continuations of all beams, best first; impossible ones are left out."""
    params = state.params
    if state.done:
        raise ValueError("the search is over; look at finished(state)")
    fits = logprobs.ndim == 2 and len(logprobs) == len(state.beams) and logprobs.dtype == np.float32
    if not fits or tokens.shape != logprobs.shape:
        raise ValueError(
            f"tokens and float32 logprobs must have shape [{len(state.beams)} beams, k], "
            f"got {list(tokens.shape)} and {logprobs.dtype} {list(logprobs.shape)}"
        )
    if np.isnan(logprobs).any():
        beam = int(np.isnan(logprobs).any(axis=1).argmax())
        raise ValueError(f"the log-probabilities of beam {beam} hold NaN; look at what the model computed")
    so_far = np.array([beam.score for beam in state.beams], np.float32)
    totals = (logprobs + so_far[:, None]).ravel()
    best = np.argsort(-totals, kind="stable")[: num_candidates(params)]
    best = best[totals[best] > -np.inf]
    scores = totals[best] / np.float32(length**params.length_penalty)
    columns = (best // logprobs.shape[1], tokens.ravel()[best], logprobs.ravel()[best], totals[best], scores)
    return [_Candidate(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _extended(state: BeamSearch, candidate: _Candidate, score: float) -> Beam:
    parent = state.beams[candidate.parent]
    return Beam((*parent.tokens, candidate.token), (*parent.logprobs, candidate.logprob), score)


def _decided(params: BeamParams, hypotheses: tuple[Beam, ...], best_live: float, length: int) -> bool:
    """Whether the search may stop although beams could go on.

    Args:
        params: The length penalty and the rule to stop by.
        hypotheses: Finished sequences, best first.
        best_live: Summed log-probability of the best live beam.
        length: Its tokens.
    """
    if len(hypotheses) < params.num_beams:
        return False
    if params.early_stopping is True:
        return True
    # A live beam's sum only falls, so its score is at most this sum over the length that flatters it most: the greatest
    # if the penalty is above 0.  Without "never" the present length stands in for it, by custom.
    flattering = params.early_stopping == "never" and params.length_penalty > 0
    reach = params.max_new_tokens if flattering else length
    best_possible = np.float32(best_live) / np.float32(reach**params.length_penalty)
    return not best_possible > hypotheses[-1].score
