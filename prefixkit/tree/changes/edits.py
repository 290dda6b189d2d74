"""The elementary edits that every change of a prefix tree is made of."""

from __future__ import annotations

from itertools import count as count_up

import numpy as np

from prefixkit.tree.arrays import Ints
from prefixkit.tree.changes.splits import absorb_parent, split
from prefixkit.tree.node import Node
from prefixkit.tree.pages import PageAllocator, check_page_size, pages_for
from prefixkit.tree.sequence import Sequence
from prefixkit.tree.spelling import Spelling
from prefixkit.tree.state_slots import StateSlots

_NO_PAGES = np.empty(0, np.int32)
_GAP = 2  # slots left free between leaves that begin in one page: most leaves are removed before they fill them
_MOST_ANCESTORS = 128  # ancestors searched for free slots: chains may be deep


class TreeEdits:
    """Nodes, their pages and the sequences that end at them; see :class:`prefixkit.tree.PrefixTree`.

    An edit leaves the pages, links and counts of all nodes consistent.  Its caller has checked that it is possible and
    that there are enough pages.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        check_page_size(page_size)
        self.allocator = PageAllocator(num_pages)
        self.page_size = int(page_size)
        self.version = 0
        self.sequences_version = 0
        self.reserved = self.num_cached = 0
        self._node_ids = count_up()
        self._sequence_ids = count_up()
        self.root = Node(next(self._node_ids), None, self.page_size, np.empty(0, np.int32), np.empty(0, np.int32))
        self.identity = object()  # `TreeSnapshot.tree`: versions of two trees may be equal
        self.touched: set[Node] = set()  # nodes whose length or ``computed`` differs from the latest snapshot
        self.included: dict[int, Sequence] = {}  # by id: the sequences that snapshots hold
        self.states: StateSlots | None = None  # for models whose layers keep a state
        self.spelling: Spelling | None = None  # for models whose tokens may see later ones
        self._excluded = 0  # how many sequences snapshots leave out

    def __repr__(self) -> str:
        pages = f"{self.allocator.free} of {self.allocator.num_pages} pages of {self.page_size} tokens free"
        return f"PrefixTree({len(self.included) + self._excluded} sequences, {pages})"

    @property
    def partial(self) -> bool:
        """Whether snapshots leave something out."""
        return bool(self.num_cached or self._excluded)

    def _new_sequence(self, node: Node) -> Sequence:
        sequence = Sequence(next(self._sequence_ids), node, self)
        node.sequences[sequence.id] = self.included[sequence.id] = sequence
        self.sequences_version += 1
        self.version += node.index < 0 and self.partial  # the latest snapshot lacks the node
        return sequence

    def _drop(self, sequence: Sequence) -> None:
        self.version += self.partial  # if its nodes stay cached, snapshots leave them out from now on
        del sequence.node.sequences[sequence.id]
        self._excluded -= self.included.pop(sequence.id, None) is None
        sequence.tree = None
        self.sequences_version += 1

    def _move(self, sequence: Sequence, node: Node) -> None:
        self.version += self.partial  # as in `_drop`
        del sequence.node.sequences[sequence.id]
        node.sequences[sequence.id] = sequence
        sequence.node = node
        self.sequences_version += 1

    def mark_all_computed(self, node: Node) -> None:
        """Declare that all tokens of a node of the tree have KV in the pool."""
        node.set_computed(node.length)
        self.touched.add(node)

    def _slot_donor(self, parent: Node | None) -> Node | None:
        """The node in whose last page a new child of ``parent`` begins; None: the child begins on a page of its own.

        The donor is the nearest of the parent and its ancestors that has free slots.  Only leaves grow into free slots,
        and an ancestor holds its page for as long as the child lives.
        """
        if self.page_size == 1 or parent is None:
            return None
        if not parent.branches and parent.end_slot % self.page_size == 0:
            return None  # the last page is full, so a new page continues the parent's slots
        node: Node | None = parent
        for _ in range(_MOST_ANCESTORS):
            if node is None or node.free_slots:
                return node
            node = node.parent
        return None

    def new_pages(self, donor: Node | None, count: int, reserved: int) -> int:
        """New pages for ``count`` tokens of a child that fills the donor's free slots, then ``reserved`` pages."""
        return max(0, pages_for(count - (0 if donor is None else donor.free_slots), self.page_size) - reserved)

    def add_leaf(self, parent: Node, tokens: Ints, pages: Ints, donor: Node | None, skip: int = 0) -> Node:
        """A new child in the donor's free slots but the first ``skip``, the parent's reserved pages, then ``pages``."""
        first_slot = 0
        if parent.reserved:
            self.reserved -= parent.reserved
            pages = np.concatenate([parent.drop_reserved(), pages])
        if donor is not None:
            last = int(donor.page_buffer[donor.num_pages - 1])
            self.allocator.share(last)
            pages = np.concatenate([[last], pages]).astype(np.int32) if len(pages) else np.array([last], np.int32)
            first_slot = donor.end_slot % self.page_size + skip
        leaf = Node(next(self._node_ids), parent, self.page_size, tokens, pages, first_slot)
        leaf.link_after(donor)
        self.reserved += leaf.reserved
        parent.adopt(leaf)
        self.version += 1
        return leaf

    def _branch(self, node: Node, children: list[tuple[Sequence, Ints]], pages: list[int]) -> None:
        """Add a child of ``node`` for each sequence and its token; one on a page of its own pops ``pages``."""
        all_leave = len(children) == len(node.sequences)  # as beams do
        if all_leave:
            children = children[:2] + children[:1:-1]
        leaf = node
        for i, (sequence, token) in enumerate(children):
            packs = all_leave and i > 2 and leaf.free_slots > _GAP
            donor, skip = (leaf, _GAP) if packs else (self._slot_donor(node), 0)
            page = _NO_PAGES if donor is not None or node.reserved else np.array([pages.pop()], np.int32)
            leaf = self.add_leaf(node, token, page, donor, skip)
            self._move(sequence, leaf)

    def split(self, node: Node, at: int) -> Node:
        """Split before token ``at``, and return the new upper half; see :func:`prefixkit.tree.changes.splits.split`."""
        self.version += 1
        return split(node, at, next(self._node_ids), self.allocator)

    def replace(self, node: Node, by: Node) -> None:
        """Replace ``node``, which has no reserved pages, by a sibling of the same tokens."""
        parent = node.parent
        assert parent is not None and by.parent is parent and by.length == node.length, (node, by)
        siblings = parent.branches[node.key]
        index = siblings.index(node)
        if index < siblings.index(by):  # a match follows the first sibling, and must find as much as before
            siblings.remove(by)
            siblings.insert(index, by)
        parent.disown(node)
        for sequence in list(node.sequences.values()):
            self._move(sequence, by)
        for child in node.children:
            by.adopt(child)
        self.num_cached -= node.cached and by.cached
        by.cached |= node.cached
        if by.computed == node.computed:
            by.state = max(by.state, node.state)
        by.uses, by.used_at = max(by.uses, node.uses), max(by.used_at, node.used_at)
        self.allocator.release(node.pages)
        self.version += 1
        self.merge(parent)  # it may have lost its second child

    def _prune(self, node: Node) -> None:
        """After ``node`` has lost a sequence: remove nodes that are no longer needed, then undo a needless split."""
        while node.parent is not None and not node.needed:
            parent = node.parent
            self.allocator.release(node.pages)
            self.reserved -= node.reserved
            parent.disown(node)
            self.version += 1
            node = parent
        self.merge(node)

    def merge(self, node: Node) -> None:
        """Merge ``node`` with its only child if nothing needs the two to be separate nodes."""
        if node.parent is None or node.sequences or node.cached or node.pins or len(node.branches) != 1:
            return
        child, *siblings = node.children
        if not siblings and child.can_absorb(node):
            absorb_parent(child, self.allocator)
            self.version += 1
