"""One run of tokens that the same sequences share, and where its KV lies."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints, appended, with_capacity

_contents = itertools.count()


class Node:
    """A run of tokens in the tree.  Every interval is half-open.

    In its sequences the node holds the positions ``[start, start + length)``.  Laid end to end, its pages are a strip
    of slots, of which it owns ``[first_slot, first_slot + length)``::

        page_size 4:   | page 7    | page 2    | page 9    |
                       | .  .  a  b| c  d  e  f| g  .  .  .|
                              ^ first_slot = 2      ^ end_slot = 9, length = 7

    The node ``previous_in_page``, if any, holds the slots before ``first_slot``.  The node ``next_in_page`` holds slots
    after ``end_slot``: the lower half of a split, a child, a node further below, a sibling that began in the same step,
    or the node that replaced one of these where equal nodes were joined.  There may be free slots between the two.  A
    leaf grows in place up to the slots of the next node in the page; most have none.  A leaf may hold reserved pages
    after the page of its last token.

    A node may begin at a later position than its parent ends: then the tokens between the two were dropped with their
    pages (:mod:`prefixkit.tree.changes.gaps`), and no match enters the node.

    The arrays have spare capacity at their ends, so that growing is amortised O(1).  Treat what ``tokens`` and
    ``pages`` return as read-only, and as valid until the tree changes.

    Attributes:
        id: unique within the tree, never reused.
        parent: None for the root, and for a node that has left the tree.
        branches: children by :attr:`key`, in order of arrival.  Siblings may begin with the same token (forks do);
            `PrefixTree.match` follows the first of them.
        next_in_page: the node that holds the next slots after this node's end in its last page; None while they are
            free.
        previous_in_page: the node whose ``next_in_page`` this is; None where no node holds slots before it in its first
            page.
        sequences: the sequences that end exactly at this node's end, by id.
        cached: whether the prefix cache retains the node, even if no sequence contains it.
        pins: how many pin guards keep the node from being evicted.
        uses, used_at: how many prefix cache hits ended in or below the node, and when it was last hit or retained.
        start: position of the first token.
        length: number of tokens; 0 only for the root.
        computed: how many tokens, from the first, have KV in the pool.
        state: slot of the state after the first ``computed`` tokens, for models that keep one; -1: no state.
        checkpoints: slots of states after fewer tokens, by the number of tokens; -1: the state is wanted, not made yet.
        first_slot: slots of the first page that lie before the first token.
        reserved: pages held for later tokens, after the pages of the tokens; 0 if the node has children.
        page_size: tokens per page.
        token_buffer: the array behind ``tokens``, whose first ``length`` entries count.
        page_buffer: the array behind ``pages``, whose first ``num_pages + reserved`` entries count.
        index: the node's index in the tree's latest snapshot; -1 if that leaves the node out.
        content: a number, unique to the node, for what its slots hold: it changes when tokens or KV are removed, not
            while the node only grows.
    """

    __slots__ = (
        "branches",
        "cached",
        "checkpoints",
        "computed",
        "content",
        "first_slot",
        "id",
        "index",
        "length",
        "next_in_page",
        "page_buffer",
        "page_size",
        "parent",
        "pins",
        "previous_in_page",
        "reserved",
        "sequences",
        "start",
        "state",
        "token_buffer",
        "used_at",
        "uses",
    )

    def __init__(
        self, id: int, parent: Node | None, page_size: int, tokens: Ints, pages: Ints, first_slot: int = 0
    ) -> None:
        """``tokens`` and ``pages`` become the node's own: pass arrays that are not written elsewhere."""
        self.id = id
        self.parent = parent
        self.branches: dict[int, list[Node]] = {}
        self.sequences: dict[int, Any] = {}
        self.start: int = 0 if parent is None else parent.start + parent.length
        self.length: int = len(tokens)
        self.computed = 0
        self.content = next(_contents)
        self.state = -1
        self.checkpoints: dict[int, int] = {}
        self.next_in_page: Node | None = None
        self.previous_in_page: Node | None = None
        self.first_slot = first_slot
        self.index = -1
        self.cached = False
        self.pins = self.uses = self.used_at = 0
        self.page_size = page_size
        self.token_buffer = tokens
        self.page_buffer = pages
        self.reserved: int = len(pages) - self.num_pages

    def __repr__(self) -> str:
        span = f"[{self.start}, {self.start + self.length})"
        return f"Node(id={self.id}, positions={span}, computed={self.computed}, {len(self.sequences)} sequences)"

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> Ints:
        """``[length]`` token ids; a view."""
        return self.token_buffer[: self.length]

    @property
    def pages(self) -> Ints:
        """``[num_pages + reserved]`` page numbers; a view."""
        return self.page_buffer[: self.num_pages + self.reserved]

    @property
    def last_token(self) -> int:
        return int(self.token_buffer[self.length - 1])

    @property
    def behind_gap(self) -> bool:
        """Whether tokens between the parent's end and the node's start were dropped."""
        return self.parent is not None and self.start != self.parent.start + self.parent.length

    @property
    def key(self) -> int:
        """The node's key in ``parent.branches``: its first token, or -1, which is no token, behind a gap."""
        return -1 if self.behind_gap else int(self.token_buffer[0])

    @property
    def children(self) -> list[Node]:
        return [child for group in self.branches.values() for child in group]

    @property
    def end_slot(self) -> int:
        """One past the last slot, counted from the first page's first slot."""
        return self.first_slot + self.length

    @property
    def num_pages(self) -> int:
        """Pages that hold tokens."""
        return -(-(self.first_slot + self.length) // self.page_size)

    @property
    def slots(self) -> NDArray[np.int64]:
        """``[length]`` pool slots of the tokens."""
        within = np.arange(self.first_slot, self.end_slot)
        return self.page_buffer[within // self.page_size].astype(np.int64) * self.page_size + within % self.page_size

    @property
    def grows_in_place(self) -> bool:
        """Whether the one sequence that ends here may append any number of tokens to this node."""
        if self.next_in_page is not None or self.branches or self.cached or self.parent is None:
            return False
        return len(self.sequences) == 1

    @property
    def needed(self) -> bool:
        """Whether children, sequences or the prefix cache hold the node in the tree."""
        return bool(self.branches or self.sequences or self.cached)

    @property
    def evictable(self) -> bool:
        """Whether the prefix cache alone holds the node."""
        return self.cached and not (self.branches or self.sequences or self.pins)

    @property
    def free_slots(self) -> int:
        """Slots after this node's end in its last page that no node holds."""
        return 0 if self.next_in_page is not None else -self.end_slot % self.page_size

    @property
    def states(self) -> list[int]:
        """The numbers of tokens after which the node has a state."""
        ends = [self.computed] if self.state >= 0 else []
        return ends + [offset for offset, slot in self.checkpoints.items() if slot >= 0]

    def state_at(self, offset: int) -> int:
        """Slot of the state after the first ``offset`` tokens (0: at the parent's end); -1 if there is no state."""
        if offset:
            return self.state if offset == self.computed else self.checkpoints.get(offset, -1)
        parent = None if self.behind_gap else self.parent
        return -1 if parent is None or parent.parent is None else parent.state_at(parent.length)

    def appends(self, count: int) -> bool:
        """Whether the one sequence that ends here may append ``count`` tokens to this node, not to a new child."""
        if self.branches or len(self.sequences) != 1 or self.cached or self.parent is None:
            return False
        following = self.next_in_page
        return following is None or self.end_slot % self.page_size + count <= following.first_slot

    def pages_to_add(self, count: int) -> int:
        """New pages needed to append ``count`` tokens to this node, or as a child that begins in its free slots."""
        return max(0, -(-(count - self.free_slots) // self.page_size) - self.reserved)

    def can_absorb(self, parent: Node) -> bool:
        """Whether this node, an only child of ``parent``, could be merged with it.

        The slots must meet, in a page that both hold or at a page boundary, and the computed tokens of the two must be
        contiguous, because ``computed`` counts from the first token.
        """
        adjacent = self.previous_in_page is parent or not self.first_slot
        meets = adjacent and parent.end_slot % self.page_size == self.first_slot
        return meets and not self.behind_gap and (parent.computed == parent.length or self.computed == 0)

    # -- children --------------------------------------------------------------------------------------------------

    def adopt(self, child: Node) -> None:
        child.parent = self
        self.branches.setdefault(child.key, []).append(child)

    def disown(self, child: Node) -> None:
        key = child.key
        siblings = self.branches[key]
        siblings.remove(child)
        if not siblings:
            del self.branches[key]
        previous, following = child.previous_in_page, child.next_in_page
        in_one_page = child.num_pages == 1  # else `previous` and `following` are in different pages
        if previous is not None:
            previous.next_in_page = following if in_one_page else None
        if following is not None:
            following.previous_in_page = previous if in_one_page else None
        child.parent = None

    def link_after(self, previous: Node | None) -> None:
        """Become the next node in the last page of ``previous``; None: no node precedes this one in its first page."""
        self.previous_in_page = previous
        if previous is not None:
            previous.next_in_page = self

    def replace_child(self, old: Node, new: Node) -> None:
        """Put ``new``, which begins with the same token, in the place of ``old`` among the children."""
        siblings = self.branches[old.key]
        siblings[siblings.index(old)] = new
        old.parent, new.parent = None, self

    # -- changing --------------------------------------------------------------------------------------------------

    def set_computed(self, computed: int) -> None:
        """Set how many tokens have KV; the state after the old, smaller number becomes a checkpoint."""
        if computed == self.computed:
            return
        before, self.computed = self.computed, computed
        if computed < before:
            self.content = next(_contents)
        if self.state >= 0 and before and before < computed:
            self.checkpoints[before] = self.state
        self.state = self.checkpoints.pop(computed, -1)

    def grow(self, tokens: Ints, pages: Ints) -> None:
        """Append ``tokens``; ``pages`` are the `pages_to_add` they need."""
        if len(pages):
            self.reserve(pages)
        before = self.num_pages
        self.token_buffer = appended(self.token_buffer, self.length, tokens)
        self.length += len(tokens)
        self.reserved -= self.num_pages - before

    def append_reserved(self, tokens: Ints, count: int) -> int:
        """Append ``count`` tokens in slots that are free or reserved; all but the last have KV.

        Returns:
            How many reserved pages these tokens take.
        """
        length = self.length
        if length + count > len(self.token_buffer):
            self.token_buffer = with_capacity(self.token_buffer, length, count)
        self.token_buffer[length : length + count] = tokens
        end = self.first_slot + length
        taken = -(-(end + count) // self.page_size) - -(-end // self.page_size)
        assert taken <= self.reserved and self.grows_in_place, self
        self.reserved -= taken
        self.length, self.computed = length + count, length + count - 1
        return taken

    def reserve(self, pages: Ints) -> None:
        """Hold ``pages`` for later tokens."""
        self.page_buffer = appended(self.page_buffer, self.num_pages + self.reserved, pages)
        self.reserved += len(pages)

    def drop_reserved(self, left: int = 0) -> Ints:
        """Keep the first ``left`` reserved pages; returns the others, which the caller must release."""
        pages = self.pages[self.num_pages + left :]
        self.reserved = left
        return pages

    def drop_front(self, count: int) -> Ints:
        """Drop the first ``count`` tokens, which end with a page; returns their pages for the caller to release."""
        parent, held = self.parent, (self.first_slot + count) // self.page_size
        assert parent is not None and count < self.length and count <= self.computed, self
        assert (self.first_slot + count) % self.page_size == 0, self
        siblings = parent.branches[self.key]
        siblings.remove(self)
        if not siblings:
            del parent.branches[self.key]
        pages, self.page_buffer = self.page_buffer[:held].copy(), self.page_buffer[held:]
        self.token_buffer, self.first_slot = self.token_buffer[count:], 0
        self.start, self.length, self.computed = self.start + count, self.length - count, self.computed - count
        self.checkpoints = {at - count: slot for at, slot in self.checkpoints.items() if at > count}
        self.content = next(_contents)
        if self.previous_in_page is not None:
            self.previous_in_page.next_in_page = None
            self.previous_in_page = None
        parent.adopt(self)
        return pages

    def push_page(self, page: int) -> None:
        """Add the page that the next `push` needs.  Only for a node whose last page is full, with none reserved."""
        held = (self.first_slot + self.length) // self.page_size
        if held == len(self.page_buffer):
            self.page_buffer = with_capacity(self.page_buffer, held, 1)
        self.page_buffer[held] = page

    def push(self, token: int) -> None:
        """Append one token: a faster `grow` for the decode step, in which a thousand leaves grow."""
        length = self.length
        if length == len(self.token_buffer):
            self.token_buffer = with_capacity(self.token_buffer, length, 1)
        self.token_buffer[length] = token
        self.length = length + 1

    def shorten(self, length: int) -> Ints:
        """Keep the first ``length`` tokens (at least one); returns the pages after these for the caller to release."""
        pages, held, self.reserved = self.pages, self.num_pages, 0
        self.length, self.content = length, next(_contents)
        self.set_computed(min(self.computed, length))
        self.checkpoints = {at: slot for at, slot in self.checkpoints.items() if at < length}
        if self.num_pages < held and self.next_in_page is not None:
            self.next_in_page.previous_in_page = None
            self.next_in_page = None
        return pages[self.num_pages :]
