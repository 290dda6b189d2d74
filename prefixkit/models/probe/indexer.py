"""What the indexer of an attention layer selects, measured on arbitrary keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prefixkit.models.indexing.indexers import (
    Block,
    IndexerCall,
    IndexKeys,
    checked_selection,
    in_texts,
    is_selection_mask,
    selected_of,
)
from prefixkit.models.probe.mask import window_of

_KEYS, _MOST_KEYS = 1 << 12, 1 << 16  # numbers of keys; the indexer must leave some out


@dataclass(frozen=True, eq=False)
class Selection:
    """What an indexer does for the rows of a pass.

    Attributes:
        found: The indexer's output if the rows are one text: ``[1, rows, k]`` indices or ``[1, rows, rows]`` a mask.
        keys: ``[1, rows, dim]`` the keys that the indexer caches.
        most: Number of tokens that it selects of longer texts; 0 if it also leaves out tokens of shorter texts.
        added: The dtype of a mask that is added to scores; None for a bool mask and for indices.
    """

    found: Tensor
    keys: Tensor
    most: int
    added: torch.dtype | None

    @property
    def is_mask(self) -> bool:
        """Whether the indexer returns a mask."""
        return is_selection_mask(self.found)

    @property
    def shown(self) -> Tensor:
        """``[rows, rows]`` bool the tokens selected for each row, among those that the row sees."""
        rows = self.found.shape[1]
        shown = self.found[0] if self.is_mask else selected_of(self.found, rows)
        at = torch.arange(rows, device=shown.device)
        return shown & (at <= at[:, None])

    def mask(self, length: int | None) -> Tensor:
        """Replaces the indexer's mask: a step's mask, or after ``length`` tokens a mask that hides the first token."""
        rows, device = self.found.shape[1], self.found.device
        if length is None:
            return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=device)
        if self.added is None:
            shown = torch.ones((1, 1, rows, length + rows), dtype=torch.bool, device=device)
            shown[..., 0] = False
            return shown
        mask = torch.zeros((1, 1, rows, length + rows), dtype=self.added, device=device)
        mask[..., 0] = torch.finfo(self.added).min
        return mask

    @staticmethod
    def without(mask: Tensor) -> Tensor | None:
        """``mask`` as it was before the mask of :meth:`mask` was applied to it; None if that was not applied."""
        first = mask[..., 0]
        hidden = ~first if mask.dtype == torch.bool else first <= torch.finfo(mask.dtype).min / 2
        if not bool(hidden.all()):
            return None
        mask = mask.clone()
        mask[..., 0] = mask.dtype == torch.bool
        return mask


class ProbedIndexer:
    """An indexer as an attention module calls it for the rows of a probe's pass.

    Args:
        call: The call.
        length: Tokens before the rows that the cache claims to hold; None for a step over a tree, whose last row has
            the token and the position of its first.
        has_values: Whether tensors have values.
    """

    def __init__(self, call: IndexerCall, length: int | None, has_values: bool) -> None:
        self._call, self._length, self._has_values = call, length, has_values
        self._cached: list[Tensor] = []
        self._masked = False  # whether a mask tells the indexer what rows see
        self._looked: dict[Tensor, bool] = {}  # whether an argument of the indexer is a mask

    def selection(self) -> Selection:
        """Run the indexer.

        Raises:
            ValueError: the indexer does not do what :class:`StepIndexer` assumes; the message says why.
        """
        rows = self._call.total
        at = torch.arange(rows, device=self._device)
        block = Block(0, rows, at[None], at, at[None], at.new_zeros(1), (at <= at[:, None])[None])
        returned = self._call.returned(IndexKeys(self._note, block), block, self._is_mask)
        own = checked_selection(returned, block)
        added = returned.dtype if returned.is_floating_point() else None
        if len(self._cached) != 1 or self._cached[0].ndim != 3 or self._cached[0].shape[:2] != (1, rows):
            raise ValueError(f"an indexer caches other keys than one of each token, {[*map(_shape, self._cached)]}")
        (keys,) = self._cached
        if not self._has_values:
            return Selection(own, keys, self._run(keys, _KEYS).shape[1], added)
        count = _KEYS
        while (most := int(self._counts(keys, count).max())) == count:
            if count == _MOST_KEYS:
                raise ValueError(f"an indexer selects all of {count} tokens")
            count *= 2
        if self._length is None:
            self._check(keys, most)
        if not bool(self._counts(keys, 1).all()):
            raise ValueError("an indexer selects no token of a short text, and attention to none is not defined")
        sizes = {1, 2, 3, most - 1, most} - {0}
        whole = all(bool((self._counts(keys, size) == size).all()) for size in sizes if size <= most)
        return Selection(own, keys, most if whole else 0, added)

    def _counts(self, keys: Tensor, count: int) -> Tensor:
        """``[rows]`` the number of tokens selected among ``count``."""
        found = self._run(keys, count)
        return (found if is_selection_mask(found) else found >= 0).sum(1)

    def _check(self, keys: Tensor, most: int) -> None:
        """Check that a row's tokens depend only on the row and the keys that it sees, not on their place in a batch."""
        count = 4 * most
        hidden = torch.arange(count, device=keys.device) % 2 == 1
        found = self._tokens(self._run(keys, count, hidden), count)
        if self._masked and bool((found & hidden).any()):
            raise ValueError("an indexer selects tokens that its mask hides, and leaves out others")
        whole = self._tokens(self._run(keys, count), count)
        if not all(torch.equal(each[0], each[-1]) for each in (found, whole)):
            raise ValueError("an indexer selects other tokens for the same token at the same position")
        if not torch.equal(self._tokens(self._run(keys, count, padding=3), count), whole):
            raise ValueError("an indexer selects other tokens behind padding")

    def _tokens(self, found: Tensor, count: int) -> Tensor:
        """``[rows, count]`` bool: which tokens are selected."""
        return found[:, :count] if is_selection_mask(found) else selected_of(found[None], count)

    def _run(self, like: Tensor, count: int, hidden: Tensor | None = None, padding: int = 0) -> Tensor:
        """``[rows, ...]`` the selection among ``count`` arbitrary keys after padding: each row is the last of a text
        that has exactly these keys.
        """
        call, device = self._call, like.device
        size, rows, total = count * like.shape[2], call.total, padding + count
        numbers = torch.sin(torch.arange(size, dtype=torch.float64, device="cpu") ** 2).to(device, like.dtype)
        keys = nn.functional.pad(numbers.view(count, like.shape[2]), (0, 0, padding, 0)).expand(rows, -1, -1)
        shown = torch.ones(count, dtype=torch.bool, device=device) if hidden is None else ~hidden
        shown = nn.functional.pad(shown, (padding, 0)).expand(rows, 1, -1).contiguous()
        at = torch.arange(rows, device=device)
        slots = at.new_zeros(rows, total)
        block = Block(0, rows, at[:, None], at, slots, at.new_full((rows,), padding), shown)
        found = call.run(IndexKeys(lambda own: keys, block), block, self._is_mask)
        return in_texts(block, found)

    @property
    def _device(self) -> torch.device:
        return next(self._call.indexer.parameters()).device

    def _note(self, keys: Tensor) -> Tensor:
        self._cached.append(keys)
        return keys

    def _is_mask(self, tensor: Tensor) -> bool:
        """Whether a tensor is the mask of the pass; ValueError if the mask hides more than the tokens after a row."""
        if tensor not in self._looked:  # all runs get the same tensors, and a mask takes long to check
            self._looked[tensor] = self._looks_like_mask(tensor)
        self._masked = self._masked or self._looked[tensor]
        return self._looked[tensor]

    def _looks_like_mask(self, tensor: Tensor) -> bool:
        rows = self._call.total
        if self._length is None:
            return not tensor.numel()
        if tensor.ndim not in (3, 4) or tensor.shape[-2] != rows or tensor.shape[-1] < self._length + rows:
            return False
        if tensor.dtype != torch.bool:
            hidden = tensor <= torch.finfo(tensor.dtype).min / 2
            if not hidden.any() or tensor.masked_fill(hidden, 0).any():
                return False
        if window_of(tensor if tensor.ndim == 4 else tensor[:, None], self._length, rows, None) is not None:
            raise ValueError("an indexer is not shown all tokens of a text")
        return True


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
