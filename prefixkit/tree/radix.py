"""The prefix tree: finds what sequences share, token by token, and keeps each shared run once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from itertools import compress, pairwise
from itertools import count as count_up
from operator import not_

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prefixkit.tree import freeze
from prefixkit.tree.chains import chains
from prefixkit.tree.match import Match, follow
from prefixkit.tree.node import Node, Sequence
from prefixkit.tree.pages import OutOfPages, PageAllocator, check_page_size, pages_for
from prefixkit.tree.snapshot import TreeSnapshot
from prefixkit.tree.tokens import as_tokens

__all__ = ["Match", "Node", "OutOfPages", "PrefixTree", "Sequence"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_NO_PAGES = np.empty(0, np.int32)
_GAP = 2  # slots left free between leaves that begin in one page: most are gone before they have filled them
_NODES_A_PAGE = 3  # a copy may take a page more than it gives back for so many nodes that go
_REACH = 128  # nodes that are asked for free slots at most: chains may be deep


class PrefixTree:
    """A radix tree of token sequences whose nodes own slices of ref-counted pages.

    A node ends where sequences part or where a sequence ends.  Sharing is found by `insert`; `fork` declares it.  Only
    `compact` moves KV: a split shares the page it cuts, the first child of a leaf continues in the leaf's last page,
    and further children begin in the free slots of an ancestor's last page, or on pages of their own.  Of beams that
    fork, the third and those after it, most of which die soon, begin in one page: see `extend_each`.

    Every method checks before it changes: one that raises has changed nothing.

    Args:
        num_pages: pages in the pool.
        page_size: tokens per page, 1 to 128.

    Attributes:
        root: holds no tokens; its children are the roots of the forest.
        version: grows whenever nodes are added, removed, split, merged or shortened.
        sequences_version: grows whenever sequences are added, removed or moved to another node.
        reserved: pages that leaves hold for tokens to come.

    Raises:
        ValueError: ``num_pages`` below 1, or ``page_size`` outside 1..128.
    """

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        check_page_size(page_size)
        self.allocator = PageAllocator(num_pages)
        self.page_size = int(page_size)
        self._identity = object()  # of its snapshots: versions of two trees may be equal
        self.version = 0
        self.sequences_version = 0
        self.reserved = 0
        self._node_ids = count_up()
        self._sequence_ids = count_up()
        self.root = Node(next(self._node_ids), None, self.page_size, np.empty(0, np.int32), np.empty(0, np.int32))
        self._frozen: freeze.Frozen | None = None
        self._touched: set[Node] = set()  # nodes with another length or ``computed`` than the latest snapshot says

    # -- reading ---------------------------------------------------------------------------------------------------

    def match(self, tokens: ArrayLike) -> Match:
        """The longest prefix of ``tokens`` that the tree holds.  Changes nothing.  O(tokens)."""
        return follow(self.root, as_tokens(tokens))

    def pages_to_extend(self, sequence: Sequence, count: int) -> int:
        """Pages that `extend` takes at most for ``count`` more tokens of ``sequence``, whatever grows beside it.

        A sequence that shares its last node may take fewer: it begins in free slots where there are any.
        """
        node = self._node_of(sequence)
        return node.pages_to_add(count) if node.grows_in_place else pages_for(count, self.page_size)

    def snapshot(self) -> TreeSnapshot:
        """The tree as flat arrays, in depth-first order; the same object while nothing has changed."""
        return self._freeze().snapshot

    def nodes(self) -> list[Node]:
        """The nodes in the snapshot's order, without the root."""
        return list(self._freeze().nodes)

    # -- changing --------------------------------------------------------------------------------------------------

    def insert(self, tokens: ArrayLike, found: Match | None = None) -> Sequence:
        """Add a sequence, sharing whatever the tree holds of it.

        Only the tokens that are new take pages.  Where the sequence leaves a node before the node's end, the node is
        split, and no KV is copied.

        Args:
            tokens: ``[length]`` token ids.
            found: What `match` has just returned for them, so that the tree is not searched twice; None: it is
                searched.

        Raises:
            ValueError, TypeError: ``tokens`` is empty or not token ids.
            OutOfPages: not enough free pages; nothing has changed.
        """
        values = as_tokens(tokens) if found is None else np.asarray(tokens, np.int32)  # `match` has checked them
        found = follow(self.root, values) if found is None else found
        rest = values[found.length :]
        node, splits = found.node, found.offset < found.node.length
        host = self._host(node.parent if splits else node)  # the slots behind the upper half are the lower half's
        reserved = 0 if splits else node.reserved
        pages = self.allocator.allocate(self._pages_behind(host, len(rest), reserved))  # the last step that can fail

        if splits:
            node = self._split(node, found.offset)
        if len(rest):
            node = self._add_leaf(node, rest.copy(), pages, host)
        return self._new_sequence(node)

    def fork(self, sequence: Sequence, count: int = 1) -> list[Sequence]:
        """``count`` more sequences with the tokens of ``sequence``.  O(count); takes no pages.

        Raises:
            ValueError: ``count`` below 1, or ``sequence`` is not live in this tree.
        """
        node = self._node_of(sequence)
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        return [self._new_sequence(node) for _ in range(count)]

    def extend(self, sequence: Sequence, tokens: ArrayLike) -> None:
        """Append ``tokens``: to the node where the sequence ends, if a leaf of its own, else to a new child.

        Raises:
            ValueError, TypeError: ``tokens`` is empty or not token ids, or ``sequence`` is not live in this tree.
            OutOfPages: not enough free pages; nothing has changed.
        """
        values = as_tokens(tokens)
        node = self._node_of(sequence)
        if node.appends(len(values)):
            pages = self.allocator.allocate(node.pages_to_add(len(values)))
            self.reserved -= node.reserved
            node.grow(values, pages)
            self.reserved += node.reserved
            self._touched.add(node)
        else:
            host = self._host(node)
            pages = self.allocator.allocate(self._pages_behind(host, len(values), node.reserved))
            self._move(sequence, self._add_leaf(node, values.copy(), pages, host))

    def reserve(self, sequences: Iterable[Sequence], tokens: Iterable[int]) -> None:
        """Let the leaf of each sequence hold the pages of so many tokens to come: no more, and no fewer.

        Raises:
            ValueError: a sequence has no leaf of its own that grows in place, or is not live in this tree.
            OutOfPages: not enough free pages for all of them; nothing has changed.
        """
        nodes = [self._node_of(sequence) for sequence in sequences]
        if not all(node.grows_in_place for node in nodes):
            raise ValueError("a sequence that shares its last node or page has no pages of its own; extend it first")
        missing = [(node, node.pages_to_add(count), count) for node, count in zip(nodes, tokens, strict=True)]
        pages = self.allocator.allocate(sum(more for _, more, _ in missing))
        for node, more, count in missing:
            before, pages = pages[:more], pages[more:]
            node.reserve(before)
            surplus = node.give_back(-(-max(0, count - node.free_slots) // self.page_size))
            self.allocator.release(surplus)
            self.reserved += more - len(surplus)
            self.version += len(surplus) > 0  # of one version a later snapshot has no fewer pages
        self._touched.update(nodes)

    def extend_each(self, sequences: Ordered[Sequence], tokens: ArrayLike) -> None:
        """Append ``tokens[i]`` to ``sequences[i]``: the decode step.

        Where all sequences that end at a node go on, as beams do, and not samples of a prompt that is kept, its
        children from the third on begin in one page, with room for two more tokens behind each.  The third, the
        likeliest of them to live where the best come first, lies behind the others and grows in place; one that comes
        to the slots of another starts a child.

        Raises:
            ValueError, TypeError: lengths differ, a sequence is listed twice or not live in this tree, or ``tokens``
                are not token ids.
            OutOfPages: fewer pages are free than they may take; nothing has changed.
        """
        values = self._tokens_for(sequences, tokens)
        nodes = [sequence.node for sequence in sequences]
        in_place = [node.appends(1) for node in nodes]
        growing = list(compress(nodes, in_place))
        crossing = [node for node in growing if (node.first_slot + node.length) % self.page_size == 0]
        full = [node for node in crossing if not node.reserved]
        branching = list(compress(nodes, map(not_, in_place)))
        # The first child of a leaf takes no page where the last one has free slots, or where there are reserved ones.
        continued = len({node for node in branching if node.free_slots or node.reserved})
        # The last step that can fail.  Reversed, so that pop() deals the pages in the order of the sequences.
        pages = self.allocator.allocate(len(full) + len(branching) - continued)[::-1].tolist()

        for node in crossing:
            if node.reserved:
                node.reserved -= 1
                self.reserved -= 1
            else:
                node.push_page(pages.pop())
        for node, token in zip(growing, compress(values, in_place), strict=True):
            node.push(token)
        self._touched.update(growing)
        if branching:
            children: dict[Node, list[tuple[Sequence, Ints]]] = {}
            own = np.array(values, np.int32)[:, None]  # each token as an array
            for child in compress(zip(sequences, own, strict=True), map(not_, in_place)):
                children.setdefault(child[0].node, []).append(child)
            for node, group in children.items():
                self._branch(node, group, pages)
            if pages:
                self.allocator.release(np.array(pages, np.int32))

    def trim(self, sequence: Sequence, length: int) -> None:
        """Shorten to the first ``length`` tokens.  What no other sequence needs is released, as by `release`.

        Raises:
            ValueError: ``length`` outside ``[0, sequence.length]``, or ``sequence`` is not live in this tree.
        """
        node = self._node_of(sequence)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot trim sequence {sequence.id} of {sequence.length} tokens to {length}")
        if length == sequence.length:
            return
        if node.appends(0) and length > node.start:
            self.reserved -= node.reserved
            self.allocator.release(node.shorten(length - node.start))
            self.version += 1
            return
        target = node  # becomes the node whose positions [start, start + length) hold the last token kept
        while target.parent is not None and length <= target.start:
            target = target.parent
        if length < target.start + target.length:
            target = self._split(target, length - target.start)
        before = sequence.node
        self._move(sequence, target)
        self._prune(before)

    def release(self, sequence: Sequence) -> None:
        """Drop the sequence.  Nodes that no other needs go, and their pages with them; splits are undone.

        Raises:
            ValueError: ``sequence`` is not live in this tree (released before, or of another tree).
        """
        node = self._node_of(sequence)
        del node.sequences[sequence.id]
        sequence.tree = None
        self.sequences_version += 1
        self._prune(node)

    def mark_computed(self, nodes: Iterable[Node], computed: ArrayLike) -> None:
        """Declare that the first ``computed[i]`` tokens of ``nodes[i]`` have KV in the pool.

        Raises:
            ValueError: lengths differ, a value lies outside ``[0, node.length]``, or a node has left the tree.
        """
        nodes = list(nodes)
        values: list[int] = np.asarray(computed, np.int64).tolist()
        if len(values) != len(nodes):
            raise ValueError(f"one count for each node: got {len(values)} counts for {len(nodes)} nodes")
        for node, value in zip(nodes, values, strict=True):
            if not 0 <= value <= node.length or node.parent is None:
                raise ValueError(f"cannot mark {value} tokens of {node} computed: it has left the tree or has fewer")
        for node, value in zip(nodes, values, strict=True):
            node.computed = value
        self._touched.update(nodes)

    def compact(self, most_pages: int) -> tuple[Longs, Longs]:
        """Make one node of each long chain of short ones, which beams leave behind: a step takes longer in deep trees.

        Args:
            most_pages: Free pages that are not reserved.

        Returns:
            Which slots' KV is to be copied, and to which, in this order, before the next step: a later target may be
            an earlier source.
        """
        source, target = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for chain in chains(self.root, self.page_size):
            parent, tokens = chain[0].parent, np.concatenate([node.tokens for node in chain])
            assert parent is not None, "the root is in no chain"
            host = parent if parent.free_slots else None
            need = self._pages_behind(host, len(tokens), 0)
            held, holders = np.unique(np.concatenate([each.pages for each in chain]), return_counts=True)
            freed = int((self.allocator.refcounts[held] == holders).sum())
            if need > most_pages or need > freed + len(chain) // _NODES_A_PAGE:
                continue
            most_pages -= need - freed
            node = self._add_leaf(parent, tokens, self.allocator.allocate(need), host)
            node.computed = len(tokens)
            source += [each.slots for each in chain]
            target.append(node.slots)
            for above, each in pairwise([parent, *chain]):
                above.disown(each)
                self.allocator.release(each.pages)
            node.adopt_children(chain[-1])
            self._merge(node)
            self._merge(parent)
        return np.concatenate(source), np.concatenate(target)

    # -- steps of the above ----------------------------------------------------------------------------------------

    def _tokens_for(self, sequences: Ordered[Sequence], tokens: ArrayLike) -> list[int]:
        """The checked arguments of `extend_each`; none at all is a step in which nothing happens."""
        array = np.asarray(tokens)
        values: list[int] = as_tokens(array).tolist() if array.size else []
        if len(values) != len(sequences):
            raise ValueError(f"one token for each sequence: got {len(values)} tokens for {len(sequences)} sequences")
        if len(set(sequences)) != len(sequences):
            raise ValueError("a sequence is listed twice; extend_each appends one token to each, so list each once")
        if {sequence.tree for sequence in sequences} - {self}:
            for sequence in sequences:
                self._node_of(sequence)
        return values

    def _node_of(self, sequence: Sequence) -> Node:
        if sequence.tree is self:
            return sequence.node
        what = "has been released" if sequence.tree is None else "belongs to another tree"
        raise ValueError(f"sequence {sequence.id} {what}; use a live sequence of this tree")

    def _host(self, parent: Node | None) -> Node | None:
        """The node behind which a new child of ``parent`` begins; None: it begins on a page of its own.

        The nearest of the parent and its ancestors that has free slots.  Only leaves grow into those, and an ancestor
        holds its page for as long as the child lives.
        """
        if self.page_size == 1 or parent is None:
            return None
        if not parent.branches and parent.end_slot % self.page_size == 0:
            return None  # a page of its own meets a leaf whose last page is full
        node: Node | None = parent
        for _ in range(_REACH):
            if node is None or node.free_slots:
                return node
            node = node.parent
        return None

    def _pages_behind(self, host: Node | None, count: int, reserved: int) -> int:
        """Pages that ``count`` tokens take of a new child that begins behind ``host`` and goes on on ``reserved``."""
        free = 0 if host is None else host.free_slots
        return max(0, pages_for(count - free, self.page_size) - reserved)

    def _new_sequence(self, node: Node) -> Sequence:
        sequence = Sequence(next(self._sequence_ids), node, self)
        node.sequences[sequence.id] = sequence
        self.sequences_version += 1
        return sequence

    def _move(self, sequence: Sequence, node: Node) -> None:
        del sequence.node.sequences[sequence.id]
        node.sequences[sequence.id] = sequence
        sequence.node = node
        self.sequences_version += 1

    def _add_leaf(self, parent: Node, tokens: Ints, pages: Ints, host: Node | None, skip: int = 0) -> Node:
        """A new child: from ``skip`` slots behind ``host``, then on the parent's reserved pages, then on ``pages``."""
        first_slot = 0
        if parent.reserved:
            self.reserved -= parent.reserved
            pages = np.concatenate([parent.give_back(), pages])
        if host is not None:
            last = host.last_page
            self.allocator.share_page(last)
            pages = np.concatenate([[last], pages]).astype(np.int32) if len(pages) else np.array([last], np.int32)
            first_slot = host.end_slot % self.page_size + skip
        leaf = Node(next(self._node_ids), parent, self.page_size, tokens, pages, first_slot)
        leaf.follow(host)
        self.reserved += leaf.reserved
        parent.adopt(leaf)
        self.version += 1
        return leaf

    def _branch(self, node: Node, children: list[tuple[Sequence, Ints]], pages: list[int]) -> None:
        """A child of ``node`` for each sequence and its token; one that begins on a page of its own pops ``pages``."""
        together = len(children) == len(node.sequences)  # none stays: beams
        if together:
            children = children[:2] + children[:1:-1]
        leaf = node
        for i, (sequence, token) in enumerate(children):
            packs = together and i > 2 and leaf.free_slots > _GAP
            host, skip = (leaf, _GAP) if packs else (self._host(node), 0)
            page = _NO_PAGES if host is not None or node.reserved else np.array([pages.pop()], np.int32)
            leaf = self._add_leaf(node, token, page, host, skip)
            self._move(sequence, leaf)

    def _split(self, node: Node, at: int) -> Node:
        self.version += 1
        return node.split(at, next(self._node_ids), self.allocator)

    def _prune(self, node: Node) -> None:
        """After ``node`` has lost a sequence: remove what leads to no sequence, then undo a split that serves none."""
        while node.parent is not None and not node.branches and not node.sequences:
            parent = node.parent
            self.allocator.release(node.pages)
            self.reserved -= node.reserved
            parent.disown(node)
            self.version += 1
            node = parent
        self._merge(node)

    def _merge(self, node: Node) -> None:
        """Undo a split of ``node`` from its only child that serves no sequence."""
        if node.parent is None or node.sequences or len(node.branches) != 1:
            return
        child, *siblings = node.children
        if not siblings and child.continues(node):
            child.absorb_parent(self.allocator)
            self.version += 1

    def _freeze(self) -> freeze.Frozen:
        """The latest snapshot, brought up to date with the least work."""
        frozen = self._frozen
        if frozen is None or frozen.snapshot.version != self.version:
            frozen = freeze.rebuild(self.root, self.page_size, self.version, self.sequences_version, self._identity)
        else:
            frozen = freeze.refresh(frozen, self._touched)
            if frozen.sequences_version != self.sequences_version:
                frozen = freeze.resequence(frozen, self.root, self.sequences_version)
        self._touched.clear()
        self._frozen = frozen
        return frozen
