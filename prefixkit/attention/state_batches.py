"""How the pieces of a step run through layers that keep a state: in batches of equal length, one after another.

A module takes sequences of one length at a time.  Pieces of many lengths are cut into parts with powers of two as
lengths, the longest first, so that a wave takes at most some ten batches; each part continues from the state that the
part before it wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from prefixkit.tree.arrays import Longs
from prefixkit.tree.state_slots import Piece


@dataclass(frozen=True, eq=False)
class StateBatch:
    """Tokens of a step that run at once: ``B`` sequences of ``L`` tokens.

    Attributes:
        length: ``L``.
        rows: ``[B * L]`` int64 query rows; None: all of the step, in order.
        source: ``[B]`` int64 slots of the states before the sequences; None if they begin texts.
        target: ``[W]`` int64 slots of the states after them that are stored.
        writes: ``[W]`` int64 the sequences whose states are stored; None: all of them.
    """

    length: int
    rows: Tensor | None
    source: Tensor | None
    target: Tensor
    writes: Tensor | None

    def on(self, device: torch.device) -> StateBatch:
        """A copy on another device."""
        return StateBatch(
            self.length,
            None if self.rows is None else self.rows.to(device),
            None if self.source is None else self.source.to(device),
            self.target.to(device),
            None if self.writes is None else self.writes.to(device),
        )


@dataclass(frozen=True, eq=False)
class HostBatch:
    """A :class:`StateBatch` on the host.

    Attributes:
        length: Tokens of each sequence.
        rows, source, target, writes: As in :class:`StateBatch`, but arrays where that has None.
        num_rows: Query rows of the step.
    """

    length: int
    rows: Longs
    source: Longs
    target: Longs
    writes: Longs
    num_rows: int

    @property
    def arrays(self) -> list[Longs]:
        """The arrays to upload, in the order in which :meth:`on_device` takes them."""
        return [self.rows, self.source, self.target, self.writes]

    def unused(self) -> HostBatch:
        """The same rows over slot 0, which holds no state."""
        return replace(self, source=np.minimum(self.source, 0), target=np.zeros_like(self.target))

    @property
    def kind(self) -> tuple[int, int, int, bool, bool]:
        """What batches that run the same work have in common: all but the numbers of rows and slots."""
        return self.length, len(self.source), len(self.writes), self._is_whole, self._starts

    @property
    def _is_whole(self) -> bool:
        return len(self.rows) == self.num_rows and bool((np.diff(self.rows) == 1).all())

    @property
    def _starts(self) -> bool:
        return int(self.source[0]) < 0

    def on_device(self, uploaded: Iterator[Tensor]) -> StateBatch:
        """The batch on the device; takes its four tensors from ``uploaded``."""
        rows, source, target, writes = islice(uploaded, 4)
        every = len(self.writes) == len(self.source)
        read = None if self._starts else source
        return StateBatch(self.length, None if self._is_whole else rows, read, target, None if every else writes)


def state_batches(pieces: Sequence[Piece], num_rows: int) -> list[HostBatch]:
    """The batches of a step, in the order in which they run; the pieces cover all ``num_rows`` query rows."""
    waves: dict[int, list[Piece]] = {}
    for piece in pieces:
        waves.setdefault(piece.wave, []).append(piece)
    return [_batch(group, num_rows) for wave in sorted(waves) for group in _batches(waves[wave])]


def _batches(wave: list[Piece]) -> Iterable[list[Piece]]:
    """Groups of pieces that run at once; no piece of a wave continues another."""
    whole, parts = _by_length([wave]), _by_length(_in_powers(wave))
    return whole if len(whole) <= len(parts) else parts


def _by_length(rounds: Iterable[list[Piece]]) -> list[list[Piece]]:
    found: list[dict[tuple[int, bool], list[Piece]]] = []
    for group in rounds:
        found.append({})
        for piece in group:
            found[-1].setdefault((piece.length, piece.source < 0), []).append(piece)
    return list(chain.from_iterable(by.values() for by in found))


def _in_powers(wave: list[Piece]) -> list[list[Piece]]:
    """The same tokens as pieces with powers of two as lengths; pieces of later lists continue those of earlier ones."""
    rounds: list[list[Piece]] = []
    left = wave
    for power in reversed(range(max(piece.length for piece in wave).bit_length())):
        size = 1 << power
        parts, rest = list[Piece](), list[Piece]()
        for piece in left:
            if piece.length == size or (piece.length > size and piece.target >= 0):
                parts.append(piece._replace(length=size))
                piece = piece._replace(row=piece.row + size, length=piece.length - size, source=piece.target)
            if piece.length:
                rest.append(piece)
        left = rest
        rounds += [parts] if parts else []
    return rounds + ([left] if left else [])


def _batch(group: list[Piece], num_rows: int) -> HostBatch:
    row, lengths, source, target, _ = (np.array(of, np.int64) for of in zip(*group, strict=True))
    rows: Longs = (row[:, None] + np.arange(lengths[0])).ravel()
    writes = np.flatnonzero(target >= 0)
    return HostBatch(int(lengths[0]), rows, source, target[writes], writes, num_rows)
