"""Beam search as pure functions on scores: no model, no tree.

The rules are those of transformers' beam search, and its float32 arithmetic in its order, so that sequences and scores
agree.  At each step the live beams' continuations are ranked by summed log-probability, and the best
``num_beams * (1 + number of stop tokens)`` are candidates: enough that ``num_beams`` of them continue even if every
beam takes every stop token.  A candidate that ends is a hypothesis only if it is among the best ``num_beams``.

Two rules differ.  transformers gives beams that do not exist a score of -1e9; here there are no such beams: the first
step has one beam, and a step with fewer possible continuations than beams leaves fewer beams.  Equal hypotheses rank
in the order in which they were found.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.request import BeamParams

log = logging.getLogger("prefixkit")


@dataclass(eq=False, slots=True)
class Beam:
    """A sequence of chosen tokens: those of its parent beam, and one more.  Immutable.

    Attributes:
        parent: The beam before its last token; None for the prompt alone.
        token, logprob: The last token, and its log-probability.
        score: The sum of its log-probabilities; for a hypothesis, divided by ``length ** length_penalty``.  A float32
            value.
        length: Number of chosen tokens.
    """

    parent: Beam | None = None
    token: int = -1
    logprob: float = 0.0
    score: float = 0.0
    length: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens after the prompt; a finished beam's include its stop token."""
        return tuple(beam.token for beam in self._chosen())

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The log-probability of each token after the prompt."""
        return tuple(beam.logprob for beam in self._chosen())

    def _chosen(self) -> list[Beam]:
        """The chain of parents that have a token, and this beam last."""
        beams, beam = [], self
        while beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]


class BeamSearch(NamedTuple):
    """The search over one prompt, after some steps.

    Attributes:
        params: The parameters of the search.
        beams: The live beams, best first; before the first step the prompt alone; none once the search is over.
        hypotheses: The best finished sequences so far, best first, at most ``num_beams``.
    """

    params: BeamParams
    beams: tuple[Beam, ...] = (Beam(),)
    hypotheses: tuple[Beam, ...] = ()

    @property
    def done(self) -> bool:
        return not self.beams


# The parent, token, log-probability, summed log-probability and score of a continuation.
_Candidate = tuple[int, int, float, float, float]


def num_candidates(params: BeamParams) -> int:
    """Continuations that a step ranks: enough that ``num_beams`` of them continue even if every beam may stop."""
    return (1 + len(params.stop_token_ids or ())) * params.num_beams


def advance(
    states: Sequence[BeamSearch], tokens: NDArray[np.int64], logprobs: NDArray[np.float32]
) -> list[tuple[BeamSearch, tuple[int, ...]]]:
    """One step of searches whose parameters and numbers of live beams are equal.

    Args:
        states: Searches that are not done.
        tokens: ``[searches * beams, k]`` the likeliest tokens after each beam: :func:`num_candidates`, or the whole
            vocabulary if that is smaller.
        logprobs: ``[searches * beams, k]`` float32, their log-softmax; ``-inf`` forbids a token.

    Returns:
        For each search its next state, and for each of its new beams the index of the old beam that it extends: an old
        beam that occurs twice is forked, one that does not occur is released.

    Raises:
        ValueError: a search is over, the searches differ in parameters or number of beams, a shape or dtype does not
            fit, or a log-probability is NaN.
    """
    candidates = _best_candidates(states, tokens, logprobs)
    return [_advanced(state, best) for state, best in zip(states, candidates, strict=True)]


def _advanced(state: BeamSearch, candidates: list[_Candidate]) -> tuple[BeamSearch, tuple[int, ...]]:
    params, length = state.params, 1 + state.beams[0].length

    def extended(one: _Candidate, score: float) -> Beam:
        return Beam(state.beams[one[0]], one[1], one[2], score, length)

    last, stops, most = _is_last(state), params.stop_token_ids or (), params.num_beams
    goes_on: list[_Candidate] = []
    found: list[Beam] = []
    for rank, one in enumerate(candidates):
        if last or one[1] in stops:
            if rank < most:
                found.append(extended(one, one[4]))
        elif len(goes_on) < most:
            goes_on.append(one)
    hypotheses = state.hypotheses
    if found:
        hypotheses = tuple(sorted((*hypotheses, *found), key=lambda beam: -beam.score)[:most])
    if goes_on and _decided(params, hypotheses, goes_on[0][3], length):
        goes_on = []
    beams = tuple([extended(one, one[3]) for one in goes_on])
    return BeamSearch(params, beams, hypotheses), tuple([one[0] for one in goes_on])


def finished(state: BeamSearch) -> list[Beam]:
    """The best finished sequences of a search that is done, best first.

    Fewer than ``num_return_sequences`` are returned only if the model forbade (``-inf``) all other sequences.

    Raises:
        ValueError: the search still runs.
    """
    count = state.params.num_return_sequences
    if not state.done:
        raise ValueError(f"the search still runs {len(state.beams)} beams; advance it until done")
    if len(state.hypotheses) < count:
        log.warning("beam search: %d of %d sequences found, the model forbids all others", len(state.hypotheses), count)
    return list(state.hypotheses[:count])


def _best_candidates(
    states: Sequence[BeamSearch], tokens: NDArray[np.int64], logprobs: NDArray[np.float32]
) -> list[list[_Candidate]]:
    """The best continuations of all beams of each search, best first; impossible ones are left out."""
    first, count = states[0], len(states)
    if any(state.done for state in states):
        raise ValueError("the search is over; look at finished(state)")
    beams, params = len(first.beams), first.params
    if any(len(one.beams) != beams or (one.params is not params and one.params != params) for one in states):
        raise ValueError("searches take a step together where their parameters are equal, and their live beams as many")
    fits = logprobs.ndim == 2 and len(logprobs) == count * beams and logprobs.dtype == np.float32
    if not fits or tokens.shape != logprobs.shape:
        raise ValueError(
            f"tokens and float32 logprobs must have shape [{count} * {beams} beams, k], "
            f"got {list(tokens.shape)} and {logprobs.dtype} {list(logprobs.shape)}"
        )
    if np.isnan(logprobs).any():
        beam = int(np.isnan(logprobs).any(axis=1).argmax()) % beams
        raise ValueError(f"the log-probabilities of beam {beam} hold NaN; look at what the model computed")
    so_far = np.array([beam.score for state in states for beam in state.beams], np.float32)
    totals = (logprobs + so_far[:, None]).reshape(count, -1)
    best = _largest(totals, num_candidates(params))
    at = best + np.arange(count)[:, None] * totals.shape[1]
    ids = tokens.ravel()[at]
    if not (any((ids == stop).any() for stop in params.stop_token_ids or ()) or any(map(_is_last, states))):
        best, at, ids = (of[:, : params.num_beams] for of in (best, at, ids))  # further ones matter only if some end
    total = totals.ravel()[at]
    length = np.array([(1 + state.beams[0].length) ** params.length_penalty for state in states], np.float32)
    columns = (best // logprobs.shape[1], ids, logprobs.ravel()[at], total, total / length[:, None])
    rows = [list(zip(*row, strict=True)) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return [[one for one in row if one[3] > -np.inf] for row in rows] if np.isneginf(total).any() else rows


def _largest(rows: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """``[rows, count]`` where the largest numbers of each row are, largest first and equal ones in their order."""
    if rows.shape[1] <= count:
        return np.argsort(-rows, axis=1, kind="stable")
    # Most numbers are smaller than all of these, and need not be sorted.
    row, at = np.nonzero(rows >= np.partition(rows, -count, axis=1)[:, -count, None])
    order = np.lexsort((-rows[row, at], row))
    first = np.searchsorted(row, np.arange(len(rows)))
    found: NDArray[np.intp] = at[order[first[:, None] + np.arange(count)]]
    return found


def _is_last(state: BeamSearch) -> bool:
    """Whether the next token of every beam is its last."""
    return 1 + state.beams[0].length == state.params.max_new_tokens


def _decided(params: BeamParams, hypotheses: tuple[Beam, ...], best_live: float, length: int) -> bool:
    """Whether a search may stop while beams are live; the best of them has sum ``best_live`` over ``length`` tokens."""
    if len(hypotheses) < params.num_beams:
        return False
    if params.early_stopping is True:
        return True
    # A live beam's sum only falls, so its final score is at most this sum over the most favourable length, which is the
    # greatest one if the penalty is above 0.  Without "never", transformers takes the present length.
    flattering = params.early_stopping == "never" and params.length_penalty > 0
    reach = params.max_new_tokens if flattering else length
    best_possible = np.float32(best_live) / np.float32(reach**params.length_penalty)
    return not best_possible > hypotheses[-1].score
