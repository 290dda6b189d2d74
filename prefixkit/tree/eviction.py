"""The prefix cache retains KV of finished requests in the tree, and evicts it, leaf by leaf, when pages are needed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from prefixkit.tree.changes.edits import TreeEdits
from prefixkit.tree.node import Node
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence

# The value of a node: the evictable node with the least value is evicted first.
Policy = Callable[[Node], tuple[float, ...]]

# What attending to one more position costs, as a share of a token's other work: a token at position 4,096 costs about
# twice as much as the first one.
_PER_POSITION = 1 / 4096
_BATCH = 64  # at least 1 / _BATCH of the pages are evicted at once: finding them reads the whole tree


def least_recently_used(node: Node) -> tuple[float, ...]:
    """When the node was last hit or retained."""
    return (node.used_at,)


def least_frequently_used(node: Node) -> tuple[float, ...]:
    """How often the node was hit; of nodes with equally many hits, the least recently used one is evicted first."""
    return node.uses, node.used_at


def least_recompute_cost(node: Node) -> tuple[float, ...]:
    """The cost of recomputing a byte of the node's KV, times its hits: tokens at late positions read more KV."""
    return (1 + node.uses) * (1 + _PER_POSITION * (node.start + node.length / 2)), node.used_at


POLICIES: dict[str, Policy] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "cost": least_recompute_cost,
}


@dataclass(eq=False)
class PrefixCache:
    """Retains KV of sequences that were dropped, and evicts the nodes with the least value.

    Attributes:
        tree: The tree.
        policy: The value of a node.
        tokens_queried: Tokens of the sequences that hits were recorded for.
        tokens_hit: How many of these tokens had KV.
        tokens_evicted: Tokens whose KV was evicted.
    """

    tree: PrefixTree
    policy: Policy = least_recently_used
    tokens_queried: int = 0
    tokens_hit: int = 0
    tokens_evicted: int = 0
    _now: int = 0
    _order: list[tuple[tuple[float, ...], int, int, Node]] = field(default_factory=list)  # value, used_at, id, node
    _evictions: int = 0  # since `_order` was made

    def retain(self, sequence: Sequence) -> None:
        """Drop the sequence, and retain the KV of its tokens until the pages are needed."""
        node = self.tree.retain(sequence)
        if node is not None:
            self.touch(node)

    def record_hit(self, sequence: Sequence) -> int:
        """Count a sequence that was just inserted; returns how many of its tokens, from the first, have KV."""
        self.touch(sequence.node, 1)
        computed = sequence.computed
        self.tokens_queried += sequence.length
        self.tokens_hit += computed
        return computed

    def touch(self, node: Node, uses: int = 0) -> None:
        """Note that the node and its ancestors were hit or retained now."""
        self._now += 1
        above: Node | None = node
        while above is not None:
            above.used_at, above.uses = self._now, above.uses + uses
            above = above.parent

    def free_pages(self, pages: int) -> bool:
        """Evict until ``pages`` pages are free; False if everything evictable is evicted and they still are not."""
        allocator, tree = self.tree.allocator, self.tree
        most = max(pages - allocator.free, allocator.num_pages // _BATCH) if pages > allocator.free else 0
        while most > 0 and (node := self._first()) is not None:
            parent, length = node.parent, node.length
            most -= evict(tree, node, most)
            self.tokens_evicted += length - (node.length if node.cached else 0)
            for left in (node, parent):
                if left is not None and left.evictable:
                    self._push(left)
        return pages <= allocator.free

    def free_pages_or_none(self, pages: int) -> bool:
        """:meth:`free_pages`, but nothing is evicted if free pages and those that the cache alone holds are too few."""
        tree, allocator = self.tree, self.tree.allocator
        if pages > allocator.free:
            most = allocator.num_pages - tree.pages_held() - tree.reserved  # pinned ones included: cheap to know
            if pages > most or pages > allocator.free + self._pages_alone():
                return False
        return self.free_pages(pages)

    def _pages_alone(self) -> int:
        """How many pages the cache alone holds: neither sequences, pinned ones among them, nor pin guards need them."""
        tree, allocator = self.tree, self.tree.allocator
        needed, pages = set[Node](), [np.empty(0, np.int32)]
        for node in reversed(tree.every_node()):  # children before parents
            if node.parent is not None and (node.sequences or node.pins or node in needed):
                needed.add(node.parent)
                pages.append(node.pages)
        return allocator.num_pages - allocator.free - len(np.unique(np.concatenate(pages)))

    def clear(self) -> None:
        """Evict whatever no sequence needs."""
        while (node := self._first()) is not None:
            evict(self.tree, node, node.num_pages)

    @contextmanager
    def pinned(self, node: Node) -> Iterator[None]:
        """A pin guard: nothing between the root and the node is evicted inside the context.

        Repeat a match that ends in the node afterwards: evicting its siblings or children may merge the node with its
        parent or its last child.
        """
        node.pins += 1
        try:
            yield
        finally:
            node.pins -= 1
            self.tree.merge(node)

    def _first(self) -> Node | None:
        """Pop the evictable node with the least value from the order; None if no node is evictable."""
        if not self.tree.num_cached:
            return None  # without scanning all nodes that sequences need
        while True:
            if not self._order or self._evictions * 4 > len(self._order):
                self._scan()
                if not self._order:
                    return None
            _, used_at, _, node = heapq.heappop(self._order)
            if node.parent is None or not node.evictable:
                continue
            if node.used_at == used_at:
                self._evictions += 1
                return node
            self._push(node)

    def _scan(self) -> None:
        """Put all evictable nodes in order."""
        evictable = (node for node in self.tree.every_node() if node.evictable)
        self._order = [(self.policy(node), node.used_at, node.id, node) for node in evictable]
        heapq.heapify(self._order)
        self._evictions = 0

    def _push(self, node: Node) -> None:
        heapq.heappush(self._order, (self.policy(node), node.used_at, node.id, node))


def evict(tree: TreeEdits, node: Node, pages: int) -> int:
    """Release the last ``pages`` pages of an evictable node, or all it has; returns how many pages became free.

    A parent that nothing else holds is then cached instead.  ValueError: the node is not :attr:`~Node.evictable`.
    """
    parent, free = node.parent, tree.allocator.free
    if not node.evictable or parent is None:
        raise ValueError(f"{node} cannot be evicted: it is pinned, or not cached, or sequences need it")
    tree.version += node.index >= 0
    length = (node.num_pages - pages) * tree.page_size - node.first_slot
    if length > 0 and tree.spelling is not None:  # a span is evicted as a whole
        length -= int(tree.spelling.place(node.tokens[length : length + 1])[0])
    if length > 0:
        tree.allocator.release(node.shorten(length))
        return tree.allocator.free - free
    tree.allocator.release(node.pages)
    parent.disown(node)
    node.cached, tree.num_cached = False, tree.num_cached - 1
    if parent.parent is not None and not parent.needed:
        parent.cached, tree.num_cached = True, tree.num_cached + 1
    else:
        tree.merge(parent)
    tree.version += not tree.partial  # a snapshot of all nodes may now have another order
    return tree.allocator.free - free
