"""Where samples are in their grammars, and what the rows of a batch may sample next."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prefixkit.sampling.grammar import Matcher

log = logging.getLogger("prefixkit")


class GrammarPlace:
    """Where one sample is in its grammar: a matcher that follows its tokens, each once.

    Args:
        matcher: Before the sample's first token; its own.
        stop_token_ids: Tokens that end the sample.

    Attributes:
        ended: Whether the sample has ended by a stop token.
        lost: Whether the matcher goes on no more; then nothing is allowed.
        may_end: Whether the text may end where it is, by the mask that was filled last before that.
    """

    def __init__(self, matcher: Matcher, stop_token_ids: Sequence[int]) -> None:
        self.matcher, self.stops = matcher, tuple(token for token in stop_token_ids if token < matcher.vocab)
        self.ended = self.lost = self.may_end = False
        self._accepted = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Accept those of the sample's tokens that were not accepted before."""
        for token in tokens[self._accepted :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Accept the next token that was sampled; -1 for none."""
        self._accepted += 1
        if self.ended or self.lost:
            return
        if token in self.stops:
            self.ended = True
        elif token < 0:
            self.lost = True
        elif not self.matcher.accept(token):
            log.warning("a grammar's matcher refused token %d, which it had allowed: the sample ends", token)
            self.lost, self.may_end = True, False


class GrammarMasks:
    """What each row of a batch may sample (see ``TokenMasks``): rows without a grammar, or with an end, anything.

    Args:
        rows: The place of each row; None where there is no grammar.
    """

    def __init__(self, rows: Sequence[GrammarPlace | None]) -> None:
        self._rows = list(rows)

    def accept(self, tokens: NDArray[np.int64]) -> None:
        for place, token in zip(self._rows, tokens.tolist(), strict=True):
            if place is not None:
                place.accept(token)

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]

    def fill(self, vocab: int) -> NDArray[np.int32]:
        width = -(-vocab // 32)
        held = {row: place for row, place in enumerate(self._rows) if place is not None and not place.ended}
        allowed = _allowed([*held.values()])[:, :width] if held else np.empty((0, width), np.int32)
        if len(held) == len(self._rows) and allowed.shape[1] == width:
            return allowed
        found = np.full((len(self._rows), width), -1, np.int32)
        found[[*held]] = 0  # the model may have more tokens than the tokenizer
        found[[*held], : allowed.shape[1]] = allowed
        return found


def _allowed(places: list[GrammarPlace]) -> NDArray[np.int32]:
    """``[places, ceil((vocab + 1) / 32)]`` what may follow each, with stop tokens where its text may end."""
    vocab = places[0].matcher.vocab
    last, bit = divmod(vocab, 32)
    bits = np.zeros((len(places), last + 1), np.int32)
    alive = [row for row, place in enumerate(places) if not place.lost]
    for kind in {type(places[row].matcher) for row in alive}:
        rows = [row for row in alive if type(places[row].matcher) is kind]
        kind.fill([places[row].matcher for row in rows], rows, bits)
    ends = bits[:, last] >> bit & 1 != 0
    bits[:, last] &= np.int32((1 << bit) - 1)
    for row in alive:
        places[row].may_end = bool(ends[row])
    by_stops: dict[tuple[int, ...], list[int]] = {}
    for row, place in enumerate(places):
        by_stops.setdefault(place.stops, []).append(row)
    for stops, rows in by_stops.items():
        for token in stops:
            one, held = np.uint32(1 << token % 32).view(np.int32), bits[rows, token // 32]
            bits[rows, token // 32] = np.where(ends[rows], held | one, held & ~one)
    return bits
