"""What the indexer of an attention layer selects, measured on keys that mean nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.models.indexing.indexers import Block, IndexKeys, run_indexer
from prefixkit.models.probe.mask import window_of

_KEYS, _MOST_KEYS = 1 << 12, 1 << 16  # of which it must leave some out


@dataclass(frozen=True, eq=False)
class Selection:
    """What an indexer does for the rows of a pass.

    Attributes:
        indices: ``[1, rows, k]`` the tokens that it selects among the rows.
        keys: ``[1, rows, dim]`` the keys that it caches.
        most: Tokens that it selects of longer texts.
    """

    indices: Tensor
    keys: Tensor
    most: int


class ProbedIndexer:
    """An indexer as an attention module calls it for the rows of a probe's pass.

    Args:
        indexer, args, kwargs, cache: As :func:`run_indexer` takes them.
        rows: Of the pass; its last has the token and the position of its first in a step over a tree.
        length: Tokens before them that the cache claims to hold; None for a step over a tree.
        has_values: Whether tensors have values.
    """

    def __init__(
        self,
        indexer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache: object,
        rows: int,
        length: int | None,
        has_values: bool,
    ) -> None:
        self._call = indexer, args, kwargs, cache
        self._rows, self._length, self._has_values = rows, length, has_values
        self._cached: list[Tensor] = []

    def selection(self) -> Selection:
        """Run it.

        Raises:
            ValueError: it is not an indexer as :class:`StepIndexer` takes for granted; the message says why.
        """
        own = self._run(None, None)
        if len(self._cached) != 1 or self._cached[0].ndim != 3 or self._cached[0].shape[:2] != (1, self._rows):
            raise ValueError(f"an indexer caches other keys than one of each token, {[*map(_shape, self._cached)]}")
        (keys,) = self._cached
        count = _KEYS
        while (most := self._run(keys, count).shape[2]) == count:
            if count == _MOST_KEYS:
                raise ValueError(f"an indexer selects all of {count} tokens")
            count *= 2
        if self._has_values and self._length is None:
            self._check(keys, most)
        return Selection(own, keys, most)

    def _check(self, keys: Tensor, most: int) -> None:
        """That a row's tokens depend on the row and the keys that it sees alone."""
        count = 4 * most
        hidden = torch.arange(count, device=keys.device) % 2 == 1
        found = self._run(keys, count, hidden)
        if bool(hidden[found.long()].any()):
            raise ValueError("an indexer selects tokens that its mask hides, and leaves out others")
        if not torch.equal(*(found[0, row].sort().values for row in (0, -1))):
            raise ValueError("an indexer selects other tokens for the same token at the same position")

    def _run(self, like: Tensor | None, count: int | None, hidden: Tensor | None = None) -> Tensor:
        """``[1, rows, k]``: among the rows' own keys, each seeing those before; or among ``count`` others."""
        indexer, args, kwargs, cache = self._call
        device = next(indexer.parameters()).device if like is None else like.device
        at = torch.arange(self._rows, device=device)
        if like is None or count is None:
            visible = at <= at[:, None]
            block = Block(0, self._rows, at[None], at, at[None], visible[None])
            return run_indexer(indexer, args, kwargs, cache, IndexKeys(self._note), block, self._is_mask)
        size = count * like.shape[2]
        numbers = torch.sin(torch.arange(size, dtype=torch.float64, device="cpu") ** 2).to(like.device, like.dtype)
        shown = torch.ones(count, dtype=torch.bool, device=device) if hidden is None else ~hidden
        block = Block(
            0, self._rows, at[None], at, at.new_zeros(1, count), shown.expand(1, self._rows, count).contiguous()
        )
        others = IndexKeys(lambda keys: numbers.view(1, count, like.shape[2]))
        return run_indexer(indexer, args, kwargs, cache, others, block, self._is_mask)

    def _note(self, keys: Tensor) -> Tensor:
        self._cached.append(keys)
        return keys

    def _is_mask(self, tensor: Tensor) -> bool:
        """Whether a tensor is the mask of the pass; ValueError where that hides more than what is after a row."""
        if self._length is None:
            return not tensor.numel()
        if tensor.ndim not in (3, 4) or tensor.shape[-2] != self._rows or tensor.shape[-1] < self._length + self._rows:
            return False
        if tensor.dtype != torch.bool:
            hidden = tensor <= torch.finfo(tensor.dtype).min / 2
            if not hidden.any() or tensor.masked_fill(hidden, 0).any():
                return False
        if window_of(tensor if tensor.ndim == 4 else tensor[:, None], self._length, self._rows, None) is not None:
            raise ValueError("an indexer is not shown all tokens of a text")
        return True


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
