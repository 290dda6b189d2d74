"""The prefix tree: finds what sequences share, token by token, and stores each shared run once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from itertools import compress
from operator import index, not_

import numpy as np
from numpy.typing import ArrayLike

from prefixkit.tree import freeze
from prefixkit.tree.arrays import Ints, Longs
from prefixkit.tree.changes.chains import compact
from prefixkit.tree.changes.edits import TreeEdits
from prefixkit.tree.changes.gaps import above_gaps
from prefixkit.tree.match import Match, follow, join
from prefixkit.tree.node import Node
from prefixkit.tree.pages import OutOfPages, pages_for
from prefixkit.tree.sequence import Sequence, check_live, leaf_tokens, next_tokens
from prefixkit.tree.snapshot import TreeSnapshot
from prefixkit.tree.spelling import Keys
from prefixkit.tree.tokens import as_tokens

__all__ = ["Match", "Node", "OutOfPages", "PrefixTree", "Sequence"]


class PrefixTree(TreeEdits):
    """A radix tree of token sequences whose nodes own slices of ref-counted pages.

    A node ends where sequences differ or where a sequence ends.  Sharing is found by `insert`; `fork` declares it.
    Only `compact` moves KV: the halves of a split share the page it cuts, the first child of a leaf continues in the
    leaf's last page, and further children begin in free slots of an ancestor's last page, or on a page of their own.
    When beams fork, the third child and later ones share a page: see `extend_each`.

    Every method checks before it changes: one that raises has changed nothing.  Each raises ValueError for a sequence
    that is not live in this tree (released, or of another tree), and ValueError or TypeError for ``tokens`` that
    are not ``[length]`` integers of any type, 0 or larger.  Methods that take pages raise OutOfPages.

    Args:
        num_pages: pages in the pool.
        page_size: tokens per page, 1 to 128.

    Attributes:
        root: holds no tokens; its children are the roots of the forest.
        version: grows whenever nodes are added, removed, split, merged or shortened.
        sequences_version: grows whenever sequences are added, removed or moved to another node.
        reserved: pages that leaves hold for later tokens.
        num_cached: nodes that the prefix cache retains.  A snapshot leaves out nodes that lead to no sequence in it.

    Raises:
        ValueError: ``num_pages`` below 1, or ``page_size`` outside 1..128.
    """

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        super().__init__(num_pages, page_size)
        self._frozen: freeze.Frozen | None = None

    # -- reading ---------------------------------------------------------------------------------------------------

    def match(self, tokens: ArrayLike) -> Match:
        """Find the longest prefix of ``tokens``, or keys, that the tree holds.  Changes nothing.  O(tokens)."""
        return follow(self.root, self.keys_of(tokens))

    def keys_of(self, tokens: ArrayLike, text: int | None = None) -> Ints:
        """The keys that the tree stores for ``tokens`` of a text: their ids, or what :meth:`Spelling.keys` returns."""
        if isinstance(tokens, Keys):
            return tokens
        values = as_tokens(tokens)
        return values if self.spelling is None else self.spelling.keys(values, text)

    def pages_to_extend(self, sequence: Sequence, count: int) -> int:
        """An upper bound of the pages that `extend` takes for ``count`` more tokens, whatever other sequences do.

        A sequence that shares its last node may take fewer: its new node begins in free slots if there are any.
        """
        node = self._node_of(sequence)
        return node.pages_to_add(count) if node.grows_in_place else pages_for(count, self.page_size)

    def pages_held(self) -> int:
        """Pages that sequences hold, excluding reserved pages and pages that only the prefix cache retains."""
        if not self.partial:
            return self.allocator.num_pages - self.allocator.free - self.reserved
        held = np.zeros(self.allocator.num_pages, np.bool_)
        held[self.snapshot().pages] = True
        return int(np.count_nonzero(held)) - self.reserved

    def states_held(self) -> int:
        """How many states the nodes in the snapshot have, for models with layers that keep a state in place of KV."""
        return 0 if self.states is None else sum(len(node.states) for node in self._freeze().nodes)

    def every_node(self) -> list[Node]:
        """All nodes, the root among them, parents before children."""
        nodes = [self.root]
        for node in nodes:  # the list grows while it is read
            nodes.extend(node.children)
        return nodes

    def snapshot(self) -> TreeSnapshot:
        """The tree as flat arrays, in depth-first order; the same object while nothing has changed."""
        return self._freeze().snapshot

    def nodes(self) -> list[Node]:
        """The nodes in the snapshot's order, without the root."""
        return list(self._freeze().nodes)

    # -- changing --------------------------------------------------------------------------------------------------

    def insert(self, tokens: ArrayLike) -> Sequence:
        """Add a sequence of ``tokens``, or keys, sharing the prefix that the tree holds.

        Only new tokens take pages.  If the sequence diverges inside a node, the node is split, and no KV is copied.
        """
        values = np.asarray(self.keys_of(tokens))
        match = follow(self.root, values)
        new = values[match.length :]
        node, splits = match.node, match.offset < match.node.length
        donor = self._slot_donor(node.parent if splits else node)  # the lower half holds the slots after the upper half
        reserved = 0 if splits else node.reserved
        pages = self.allocator.allocate(self.new_pages(donor, len(new), reserved))  # the last step that can fail

        if splits:
            node = self.split(node, match.offset)
        if len(new):
            node = self.add_leaf(node, new.copy(), pages, donor)
        return self._new_sequence(node)

    def fork(self, sequence: Sequence, count: int = 1) -> list[Sequence]:
        """``count`` more sequences with the tokens of ``sequence``.  O(count); takes no pages.

        Raises:
            ValueError: ``count`` below 1, or above 2**31 - 1: snapshots count sequences in int32.
        """
        node = self._node_of(sequence)
        if not 1 <= count < 2**31:
            raise ValueError(f"count must be at least 1 and at most 2**31 - 1, got {count}")
        return [self._new_sequence(node) for _ in range(count)]

    def extend(self, sequence: Sequence, tokens: ArrayLike) -> None:
        """Append ``tokens`` to the node where the sequence ends if that is a leaf of its own, else to a new child."""
        values = as_tokens(tokens)
        node = self._node_of(sequence)
        if node.appends(len(values)):
            pages = self.allocator.allocate(node.pages_to_add(len(values)))
            self.reserved -= node.reserved
            node.grow(values, pages)
            self.reserved += node.reserved
            self.touched.add(node)
        else:
            donor = self._slot_donor(node)
            pages = self.allocator.allocate(self.new_pages(donor, len(values), node.reserved))
            self._move(sequence, self.add_leaf(node, values.copy(), pages, donor))

    def extend_leaves(self, sequences: Ordered[Sequence], tokens: Ints) -> None:
        """Append ``tokens[i]`` to the leaf of ``sequences[i]``, in reserved pages; all but the last have KV.

        Args:
            sequences: Each ends at a leaf of its own that grows in place, and has reserved the pages.
            tokens: ``[sequences, count]`` token ids, ``count`` at least 1.
        """
        values = leaf_tokens(self, sequences, tokens)
        count, nodes = values.shape[1], [sequence.node for sequence in sequences]
        for node, own in zip(nodes, values, strict=True):
            self.reserved -= node.append_reserved(own, count)
        self.touched.update(nodes)

    def reserve(self, sequences: Iterable[Sequence], tokens: Iterable[int]) -> None:
        """Let the leaf of ``sequences[i]`` reserve exactly the pages of its next ``tokens[i]`` tokens.

        Raises:
            ValueError: a sequence has no leaf of its own that grows in place.
        """
        nodes, size = [self._node_of(sequence) for sequence in sequences], self.page_size
        if not all(node.grows_in_place for node in nodes):
            raise ValueError("a sequence that shares its last node or page has no pages of its own; extend it first")
        ends = np.array([node.first_slot + node.length for node in nodes], np.int64)
        needed = -(-np.maximum(np.fromiter(tokens, np.int64, len(nodes)) - -ends % size, 0) // size)
        changes = needed - [node.reserved for node in nodes]
        more, at = int(changes.sum()), np.flatnonzero(changes)
        changed = [(nodes[i], change) for i, change in zip(at.tolist(), changes[at].tolist(), strict=True)]
        self.allocator.check(more)
        for node, change in changed:
            if change < 0:
                self.allocator.release(node.drop_reserved(node.reserved + change))
                self.version += 1  # within one version, snapshots never lose pages
        pages = self.allocator.allocate(sum(change for _, change in changed if change > 0))
        for node, change in changed:
            if change > 0:
                node.reserve(pages[:change])
                pages = pages[change:]
        self.reserved += more
        self.touched.update(node for node, _ in changed)

    def extend_each(self, sequences: Ordered[Sequence], tokens: ArrayLike) -> None:
        """Append ``tokens[i]``, of ``[sequences]`` token ids, to ``sequences[i]``: the decode step.

        If all sequences that end at a node are extended, as in beam search (samples leave a sequence at their prompt),
        the node's third and later children share a page, with two free slots after each.  The third child lies last
        in that page and grows in place: where the best beams come first, it is the likeliest of these to survive.  A
        child that reaches the slots of the next node in the page continues in a child of its own.

        Raises:
            ValueError: lengths differ, or a sequence is listed twice.
        """
        values = next_tokens(self, sequences, tokens)
        nodes = [sequence.node for sequence in sequences]
        in_place = [node.appends(1) for node in nodes]
        growing = list(compress(nodes, in_place))
        crossing = [node for node in growing if (node.first_slot + node.length) % self.page_size == 0]
        full = [node for node in crossing if not node.reserved]
        branching = list(compress(nodes, map(not_, in_place)))
        # The first child of a leaf takes no page if the leaf has free slots or reserved pages.
        continued = len({node for node in branching if node.free_slots or node.reserved})
        # The last step that can fail.  Reversed, so that pop() returns the pages in the order of the sequences.
        pages = self.allocator.allocate(len(full) + len(branching) - continued)[::-1].tolist()

        for node in crossing:
            if node.reserved:
                node.reserved -= 1
                self.reserved -= 1
            else:
                node.push_page(pages.pop())
        for node, token in zip(growing, compress(values, in_place), strict=True):
            node.push(token)
        self.touched.update(growing)
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
        """Shorten to the first ``length`` tokens.  Nodes that no other sequence needs are removed, as by `release`.

        Raises:
            ValueError: ``length`` outside ``[0, sequence.length]``, or inside a gap of dropped tokens.
        """
        node, length = self._node_of(sequence), index(length)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot trim sequence {sequence.id} of {sequence.length} tokens to {length}")
        if length == sequence.length:
            return
        if node.appends(0) and length > node.start:
            self.reserved -= node.reserved
            self.allocator.release(node.shorten(length - node.start))
            self.version += 1
            return
        target = node  # becomes the node whose positions [start, start + length) hold the last of ``length`` tokens
        while target.parent is not None and length <= target.start:
            target = target.parent
        if length > target.start + target.length:
            raise ValueError(f"cannot trim sequence {sequence.id} to {length} tokens: the last of these were released")
        if length < target.start + target.length:
            target = self.split(target, length - target.start)
        before = sequence.node
        self._move(sequence, target)
        self._prune(before)

    def release(self, sequence: Sequence) -> None:
        """Drop the sequence: remove nodes that no other one needs, release their pages, and undo needless splits."""
        node = self._node_of(sequence)
        self._drop(sequence)
        self._prune(node)

    def exclude_from_snapshot(self, sequence: Sequence) -> None:
        """Leave the sequence out of snapshots from now on: the tree keeps its tokens, but no step runs for it.

        Raises:
            ValueError: ``sequence`` is excluded already.
        """
        self._node_of(sequence)
        if self.included.pop(sequence.id, None) is None:
            raise ValueError(f"sequence {sequence.id} is excluded already; fork it to extend it")
        self._excluded += 1
        self.version += 1

    def retain(self, sequence: Sequence) -> Node | None:
        """Drop the sequence, and retain its tokens with KV, up to the first gap, until they are evicted.  Returns the
        node where they end; None if none is computed.
        """
        node = above_gaps(self._node_of(sequence))
        while node.parent is not None and not node.computed:
            node = node.parent
        if (end := node.start + node.computed) < sequence.length:
            self.trim(sequence, end)
        node = sequence.node
        if node.parent is None:
            self.release(sequence)
            return None
        if node.reserved:
            self.reserved -= node.reserved
            self.allocator.release(node.drop_reserved())
            self.version += 1
        node = join(self, node)
        self.num_cached, node.cached = self.num_cached + (not node.cached), True
        self._drop(sequence)
        return node

    def mark_computed(self, nodes: Iterable[Node], computed: ArrayLike) -> None:
        """Declare that the first ``computed[i]`` tokens of ``nodes[i]`` have KV in the pool; ``[nodes]`` integers.

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
            node.set_computed(value)
        self.touched.update(nodes)

    def longest_match(self, prompts: Iterable[Ints]) -> int:
        """The length of the longest :meth:`match` among these prompts, ``[length]`` token ids each."""
        return max((self.match(tokens).length for tokens in prompts), default=0)

    def invalidate_kv(self) -> None:
        """Declare that no token has KV: the prefix cache is emptied, and tokens of sequences will be recomputed."""
        nodes = self.every_node()
        for node in nodes:
            node.cached = False
            node.set_computed(0)
            node.state, node.checkpoints = -1, {}
        self.num_cached = 0
        self.version += 1
        for node in reversed(nodes):
            if node.parent is not None:  # it was not removed with a node below it
                self._prune(node)

    def compact(self, most_pages: int) -> tuple[Longs, Longs]:
        """Merge each long chain of short nodes into one, using ``most_pages``: see `tree.changes.chains.compact`."""
        return compact(self, most_pages)

    def _node_of(self, sequence: Sequence) -> Node:
        if sequence.tree is not self:
            check_live(self, sequence)
        return sequence.node

    def _freeze(self) -> freeze.Frozen:
        """The current snapshot, derived from the latest one with the least work."""
        self._frozen = freeze.latest(self, self._frozen)
        return self._frozen
