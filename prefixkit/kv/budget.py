"""What a call may take of a KV store, and the error where that is too little."""

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
    """All pages of a store but those of pinned prefixes.

    Attributes:
        tree: That of the store.
        bytes_per_token: KV of a token in all layers.
        pins: The pinned sequences.
        beside_states: Whether the other half of ``kv_budget`` is for states.
        held: What samples have to hold; None: everything.
        pinned_pages: Pages that they hold.
        pages: Pages that a call may take.
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
        """How many of these tokens, or keys, from the first, a pinned prefix holds."""
        keys = self.tree.keys_of(tokens)
        return max((common_prefix(pin, keys) for pin in self._keys), default=0)

    def pages_lacking(self, tokens: Ints, more: int = 0) -> int:
        """0 where the pages of a sequence, and ``more``, are within the budget; else how many pages it takes."""
        size = self.tree.page_size
        if (need := pages_for(len(tokens), size) + more) <= self.pages:
            return 0
        need = pages_for(len(tokens) - self.tokens_pinned(tokens), size) + more
        return need if need > self.pages else 0

    def error(self, what: str, pages: int, remedy: str) -> KVBudgetTooSmall:
        """What to raise where ``what`` takes ``pages`` pages, which are too many."""
        size, token = self.tree.page_size, self.bytes_per_token / 2**20
        need, have = (f"{n * size} tokens ({n * size * token:.1f} MiB)" for n in (pages, self.pages))
        beside = f" beside {self.pinned_pages} pages of pinned prefixes" if self.pinned_pages else ""
        half = ", its other half being for states" if self.beside_states else ""
        return KVBudgetTooSmall(
            f"{what} needs KV for {need} in pages of {size}, but the KV budget holds {have}{beside}{half}; "
            f"raise kv_budget, or {remedy}"
        )
