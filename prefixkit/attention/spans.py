"""Spans: runs of a text's tokens that see one another, under masks that show later tokens.

A token's KV depends on the tokens that it sees, and on what these see: so tokens from one that sees later ones to the
last that it sees, with all that begin in between and see further, are computed in one step, and shared as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from prefixkit.attention.variants import Variant

_BLOCK = 1024  # queries, and keys, for which masks are evaluated at once
_LENGTHS_KNOWN = 64


@dataclass(frozen=True)
class LooksAhead:
    """A variant whose queries may see later tokens, of layers of one kind.

    Attributes:
        variant: One that looks ahead, and does not read ``b``.
        heads: Query heads.
        device: Where its mask is evaluated.
    """

    variant: Variant
    heads: int
    device: torch.device

    def reach(self, length: int) -> NDArray[np.int64]:
        """``[length]`` the last position that a query at each position sees in some head, at least its own."""
        found = torch.arange(length, device=self.device)
        for begin in range(0, length, _BLOCK):
            end = min(begin + _BLOCK, length)
            for low in reversed(range(begin, length, _BLOCK)):  # the last keys first: what is found is the last
                last = self._last(torch.arange(begin, end, device=self.device), low, min(low + _BLOCK, length))
                found[begin:end] = torch.maximum(found[begin:end], last)
                if bool((last >= low).all()):
                    break
        reach: NDArray[np.int64] = found.cpu().numpy()
        return reach

    def _last(self, q: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """``[queries]`` the last of the keys ``[low, high)`` that each sees; -1 for none."""
        kv, none = torch.arange(low, high, device=self.device), torch.zeros((), dtype=torch.int64, device=self.device)
        head = torch.arange(self.heads, device=self.device)[:, None, None]
        shown = self.variant.shows(none, head, q[:, None], kv[None])
        shown = shown.any(0) if shown.ndim == 3 else shown  # no head is read where there is none
        return torch.where(shown.expand(len(q), len(kv)), kv, -1).amax(1)


class Spans:
    """The spans of texts, by their lengths.

    Args:
        masks: All that look ahead in a model's layers.
    """

    def __init__(self, masks: Sequence[LooksAhead]) -> None:
        self._masks = masks
        self._known: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def __call__(self, length: int) -> NDArray[np.int64]:
        """``[n, 2]`` begin and end of each span of a text of ``length`` tokens; runs of one token are none."""
        if length < 2:
            return np.empty((0, 2), np.int64)
        if length not in self._known:
            reach = np.maximum.reduce([mask.reach(length) for mask in self._masks])
            ends = 1 + np.flatnonzero(np.maximum.accumulate(reach) == np.arange(length))
            bounds = np.stack((np.concatenate(([0], ends[:-1])), ends), axis=1)
            self._known[length] = bounds[bounds[:, 1] - bounds[:, 0] > 1]
            if len(self._known) > _LENGTHS_KNOWN:
                self._known.popitem(last=False)
        return self._known[length]

    def forget(self) -> None:
        """What the masks capture has changed."""
        self._known.clear()
