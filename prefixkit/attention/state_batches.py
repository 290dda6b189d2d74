"""How the pieces of a step run through layers that keep a state: in batches of equal length, one after another.

A module takes sequences of one length at a time.  Pieces of many lengths are cut in powers of two, the longest first,
so that a wave of them takes at most some ten batches; each part goes on from the state that the part before has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.gpu.staging import upload
from prefixkit.tree.arrays import Longs
from prefixkit.tree.state_slots import Piece


@dataclass(frozen=True, eq=False)
class StateBatch:
    """Tokens of a step that run at once, ``B`` sequences of ``L``.

    Attributes:
        length: ``L``.
        rows: ``[B * L]`` int64 query rows; None: all, in their order.
        source: ``[B]`` int64 slots of the states before them; None at the beginning of texts.
        target: ``[W]`` int64 slots of the states after them.
        writes: ``[W]`` int64 which of the sequences these are of; None: all of them.
    """

    length: int
    rows: Tensor | None
    source: Tensor | None
    target: Tensor
    writes: Tensor | None


def state_batches(pieces: Sequence[Piece], num_rows: int, device: torch.device) -> tuple[StateBatch, ...]:
    """The batches of a step, in the order in which they run; its pieces are all ``num_rows`` query rows."""
    waves: dict[int, list[Piece]] = {}
    for piece in pieces:
        waves.setdefault(piece.wave, []).append(piece)
    return tuple(_batch(group, num_rows, device) for wave in sorted(waves) for group in _batches(waves[wave]))


def _batches(wave: list[Piece]) -> Iterable[list[Piece]]:
    """Pieces that do not go on from one another, in groups that run at once."""
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
    """The same tokens as pieces of powers of two; those of a later list go on from those of earlier ones."""
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


def _batch(group: list[Piece], num_rows: int, device: torch.device) -> StateBatch:
    row, lengths, source, target, _ = (np.array(of, np.int64) for of in zip(*group, strict=True))
    length = int(lengths[0])
    rows: Longs = (row[:, None] + np.arange(length)).ravel()
    writes = np.flatnonzero(target >= 0)
    at, slots, written, into = upload([rows, source, writes, target[writes]], device)
    return StateBatch(
        length,
        None if len(rows) == num_rows and bool((np.diff(rows) == 1).all()) else at,
        None if int(source[0]) < 0 else slots,
        into,
        None if len(writes) == len(group) else written,
    )
