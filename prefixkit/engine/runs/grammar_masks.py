"""The grammar states of samples, and masks of the tokens that the rows of a batch may sample next."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prefixkit.sampling.grammar import Matcher

log = logging.getLogger("prefixkit")


class GrammarPlace:
    """The grammar state of one sample: a matcher that accepts each of its tokens once.

    Args:
        matcher: The sample's own matcher, before its first token.
        stop_token_ids: Tokens that end the sample.

    Attributes:
        ended: Whether a stop token has ended the sample.
        lost: Whether the matcher has refused a token, or no token could be sampled; then no token is allowed.
        may_end: Whether the text may end here, according to the mask that was filled last.
    """

    def __init__(self, matcher: Matcher, stop_token_ids: Sequence[int]) -> None:
        self.matcher, self.stops = matcher, tuple(token for token in stop_token_ids if token < matcher.vocab)
        self.ended = self.lost = self.may_end = False
        self._accepted = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Accept the tokens of the sample that have not been accepted yet."""
        for token in tokens[self._accepted :]:
            accept([self], [token])

    def goes_on(self, token: int) -> bool:
        """Count the next sampled token, -1 for none; returns whether the matcher must accept it."""
        self._accepted += 1
        going = not (self.ended or self.lost)
        self.ended |= going and token in self.stops
        self.lost |= going and token < 0
        return going and not (self.ended or self.lost)

    def lose(self, token: int) -> None:
        """Record that the matcher has refused a token."""
        log.warning("a grammar's matcher refused token %d, which it had allowed: the sample ends", token)
        self.lost, self.may_end = True, False


def accept(places: Sequence[GrammarPlace | None], tokens: Sequence[int]) -> None:
    """Accept the next token of each sample; -1 for none."""
    by_kind: dict[type[Matcher], list[tuple[GrammarPlace, int]]] = {}
    for place, token in zip(places, tokens, strict=True):
        if place is not None and place.goes_on(token):
            by_kind.setdefault(type(place.matcher), []).append((place, token))
    for kind, own in by_kind.items():
        accepted = kind.accept([place.matcher for place, _ in own], [token for _, token in own])
        for (place, token), fits in zip(own, accepted, strict=True):
            if not fits:
                place.lose(token)


class GrammarMasks:
    """The tokens that each row of a batch may sample (see ``TokenMasks``): all, without a grammar or after its end.

    Args:
        rows: The grammar state of each row; None for a row without a grammar.
    """

    def __init__(self, rows: Sequence[GrammarPlace | None]) -> None:
        self._rows = list(rows)
        self._bits = np.empty((0, 0), np.int32)

    def accept(self, tokens: NDArray[np.int64]) -> None:
        accept(self._rows, tokens.tolist())

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]

    def fill(self, vocab: int) -> NDArray[np.int32]:
        held = {row: place for row, place in enumerate(self._rows) if place is not None and not place.ended}
        own = max((max(place.matcher.vocab, place.matcher.end + 1) for place in held.values()), default=vocab)
        words, own_words = -(-vocab // 32), -(-own // 32)
        if self._bits.shape[1] != own_words:  # faulting in fresh memory takes as long as filling it
            self._bits = np.empty((len(self._rows), own_words), np.int32)
        bits = self._bits[: len(self._rows)]
        if len(held) < len(bits):
            bits[:] = -1
        if held:
            _write_allowed(bits, held)
        if words <= own_words:
            return bits[:, :words]
        wide = np.full((len(bits), words), -1, np.int32)  # the model's head has more tokens than its config says
        wide[:, :own_words] = bits
        wide[[*held], own_words:] = 0
        return wide


def _write_allowed(bits: NDArray[np.int32], held: dict[int, GrammarPlace]) -> None:
    """Write the tokens that may follow each grammar state, and stop tokens where its text may end, into its row."""
    rows, places = [*held], [*held.values()]
    alive = [row for row, place in held.items() if not place.lost]
    if len(alive) < len(rows):
        bits[[row for row, place in held.items() if place.lost]] = 0
    for kind in {type(held[row].matcher) for row in alive}:
        own = [row for row in alive if type(held[row].matcher) is kind]
        kind.fill([held[row].matcher for row in own], own, bits)
    vocab, end = places[0].matcher.vocab, places[0].matcher.end
    ends = bits[rows, end // 32] >> end % 32 & 1 != 0
    _set_bit(bits, rows, end, np.zeros_like(ends))
    if len(behind := bits[0, vocab // 32 :]):  # the model may have more tokens than the tokenizer
        keep = np.zeros_like(behind)
        keep[0] = (1 << vocab % 32) - 1
        bits[np.ix_(rows, range(vocab // 32, bits.shape[1]))] &= keep
    for place, may_end in zip(places, ends.tolist(), strict=True):
        if not place.lost:
            place.may_end = may_end
    by_stops: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(places):
        by_stops.setdefault(place.stops, []).append(number)
    for stops, numbers in by_stops.items():
        for token in stops:
            _set_bit(bits, [rows[number] for number in numbers], token, ends[numbers])


def _set_bit(bits: NDArray[np.int32], rows: list[int], token: int, value: NDArray[np.bool_]) -> None:
    """Set a token's bit in each of ``rows`` to the row's ``value``."""
    one, held = np.uint32(1 << token % 32).view(np.int32), bits[rows, token // 32]
    bits[rows, token // 32] = np.where(value, held | one, held & ~one)
