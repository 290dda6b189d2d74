"""Spans: runs of a text's tokens that see one another, under masks that show later tokens.

A token's KV depends on the tokens that it sees, and on the tokens that these see.  So a token that sees later ones, and
all tokens up to the last that it or a token in between sees, are computed in one step and shared as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from prefixkit.attention.variants import Variant
from prefixkit.tree.arrays import Longs

_BLOCK = 1024  # a mask is evaluated for this many queries and keys at once
_LENGTHS_KNOWN = 256


@dataclass(frozen=True)
class LooksAhead:
    """A variant under which queries may see later tokens, for layers of one kind.

    Attributes:
        variant: A variant that looks ahead, and does not read ``b``.
        heads: Query heads.
        device: Where the mask is evaluated.
    """

    variant: Variant
    heads: int
    device: torch.device

    def later(self, queries: Longs, low: int, high: int) -> NDArray[np.bool_]:
        """``[queries, high - low]`` which keys ``[low, high)`` lie after each query and are visible in some head."""
        q = torch.from_numpy(queries).to(self.device)[:, None]
        kv = torch.arange(low, high, device=self.device)[None]
        none, head = torch.zeros_like(kv[0, :1]), torch.arange(self.heads, device=self.device)[:, None, None]
        shown = self.variant.shows(none, head, q, kv)
        shown = shown.any(0) if shown.ndim == 3 else shown  # no head dimension if the mask does not read `h`
        found: NDArray[np.bool_] = (shown & (kv > q)).cpu().numpy()
        return found


class _Seen:
    """The last later key that each query sees, and how many later keys it sees, in texts up to a given length.

    Under most masks a query sees all keys up to that last one.  Then the last key in a shorter text is known too.
    """

    def __init__(self, mask: LooksAhead) -> None:
        self._mask = mask
        self._last, self._count = np.empty(0, np.int64), np.empty(0, np.int64)

    def reach(self, length: int) -> Longs:
        """``[length]`` the last position that each query sees in a text of this length, at least its own."""
        if length > len(self._last):
            self._grow(length)
        queries = np.arange(length)
        found = np.minimum(self._last[:length], length - 1)
        gaps = (self._count[:length] < self._last[:length] - queries) & (self._last[:length] >= length)
        for rows in _blocks(np.flatnonzero(gaps)):
            last = rows.copy()
            for low in range(int(rows[0]), length, _BLOCK):
                np.maximum(last, self._in_block(rows, low, min(low + _BLOCK, length))[0], out=last)
            found[rows] = last
        return found

    def _grow(self, length: int) -> None:
        """Evaluate the mask for keys that are new at this length."""
        before, queries = len(self._last), np.arange(length)
        self._last = np.concatenate((self._last, queries[before:]))
        self._count = np.concatenate((self._count, np.zeros(length - before, np.int64)))
        for rows in _blocks(queries):
            for low in range(max(int(rows[0]), before), length, _BLOCK):
                last, count = self._in_block(rows, low, min(low + _BLOCK, length))
                self._last[rows] = np.maximum(self._last[rows], last)
                self._count[rows] += count

    def _in_block(self, rows: Longs, low: int, high: int) -> tuple[Longs, Longs]:
        """The last of the keys ``[low, high)`` that each query sees, -1 for none, and how many of them it sees."""
        shown = self._mask.later(rows, low, high)
        count = shown.sum(1)
        return np.where(count > 0, high - 1 - shown[:, ::-1].argmax(1), -1), count


def _blocks(rows: Longs) -> list[Longs]:
    return [rows[begin : begin + _BLOCK] for begin in range(0, len(rows), _BLOCK)]


class Spans:
    """The spans of texts, by length.

    Args:
        masks: All masks of a model's layers that look ahead.
    """

    def __init__(self, masks: Sequence[LooksAhead]) -> None:
        self._masks = masks
        self._known: OrderedDict[int, Longs] = OrderedDict()
        self.clear()

    def __call__(self, length: int) -> Longs:
        """``[n, 2]`` begin and end of each span of a text of ``length`` tokens; a span has at least two tokens."""
        if length < 2:
            return np.empty((0, 2), np.int64)
        if length not in self._known:
            reach = np.maximum.reduce([seen.reach(length) for seen in self._seen])
            ends = 1 + np.flatnonzero(np.maximum.accumulate(reach) == np.arange(length))
            bounds = np.stack((np.concatenate(([0], ends[:-1])), ends), axis=1)
            self._known[length] = bounds[bounds[:, 1] - bounds[:, 0] > 1]
            if len(self._known) > _LENGTHS_KNOWN:
                self._known.popitem(last=False)
        return self._known[length]

    def clear(self) -> None:
        """Drop known spans, because tensors that the masks capture have changed."""
        self._known.clear()
        self._seen = [_Seen(mask) for mask in self._masks]
