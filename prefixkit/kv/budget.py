"""The pages of a KV store that a call may use, and the error if they are too few."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prefixkit.kv.held import Held
from prefixkit.tree.arrays import Ints
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree, Sequence
from prefixkit.tree.tokens import common_prefix


class KVBudgetTooSmall(ValueError):
    """A sequence, beam search or set of prefixes does not fit a KV store even by itself."""


@dataclass(eq=False)
class Budget:
    """All pages of a store except those of pinned prefixes.

    Attributes:
        tree: The store's tree.
        bytes_per_token: Bytes of KV of a token in all layers.
        pins: The pinned sequences.
        beside_states: Whether half of ``kv_budget`` is reserved for states.
        held: Which tokens samples have to hold; None: all.
        pinned_pages: Pages that pinned sequences hold.
        pages: Pages that a call may use.
    """

    tree: PrefixTree
    bytes_per_token: int
    pins: list[Sequence]
    beside_states: bool = False
    held: Held | None = None
    pinned_pages: int = field(init=False)
    pages: int = field(init=False)

    def __post_init__(self) -> None:
        held = [pin.slots() // self.tree.page_size for pin in self.pins]
        self.pinned_pages = len(np.unique(np.concatenate(held))) if held else 0
        self.pages = self.tree.allocator.num_pages - self.pinned_pages
        self._keys = [pin.keys() for pin in self.pins]

    def tokens_pinned(self, tokens: Ints) -> int:
        """How many of these tokens (or keys), from the first, some pinned sequence holds."""
        keys = self.tree.keys_of(tokens)
        return max((common_prefix(pin, keys) for pin in self._keys), default=0)

    def pages_lacking(self, tokens: Ints, more: int = 0) -> int:
        """0 if the pages of a sequence, plus ``more``, are within the budget; else how many pages these are."""
        size = self.tree.page_size
        if (need := pages_for(len(tokens), size) + more) <= self.pages:
            return 0
        need = pages_for(len(tokens) - self.tokens_pinned(tokens), size) + more
        return need if need > self.pages else 0

    def error(self, what: str, pages: int, remedy: str) -> KVBudgetTooSmall:
        """The error to raise if ``what`` needs ``pages`` pages, which exceed the budget."""
        size, token = self.tree.page_size, self.bytes_per_token / 2**20
        need, have = (f"{n * size} tokens ({n * size * token:.2f} MiB)" for n in (pages, self.pages))
        beside = f" beside {self.pinned_pages} pages of pinned prefixes" if self.pinned_pages else ""
        half = ", its other half being for states" if self.beside_states else ""
        return KVBudgetTooSmall(
            f"{what} needs KV for {need} in pages of {size}, but the KV budget holds {have}{beside}{half}; "
            f"raise kv_budget, or {remedy}"
        )
