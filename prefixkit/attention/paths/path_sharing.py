"""Which nodes of heavy paths are worth sharing: one part of each path, whose nodes are read as one list.

The part begins at the node where it gains most, and ends where fewer than two consumers remain: a longer part costs no
more partial states.  Sums of tokens are integers, so that their order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.ancestry import mark
from prefixkit.attention.paths.heavy_paths import path_order
from prefixkit.tree.arrays import Ints, Longs, ranges
from prefixkit.tree.snapshot import TreeSnapshot


def share_paths(
    snapshot: TreeSnapshot, most: Longs, length: Ints | Longs, price: NDArray[np.float64], by_token: float
) -> NDArray[np.bool_]:
    """Decide path by path, beginning with paths from which no other path branches.

    Args:
        snapshot: The tree.
        most: ``[nodes]`` consumers of each node if no node below is shared.
        length: ``[nodes]`` tokens that each consumer but one need not read if the node is shared.
        price: ``[nodes]`` the cost of a shared part that begins with the node.
        by_token: The cost of reading a token.

    Returns:
        ``[nodes]`` True where the node is shared.
    """
    shared = np.zeros(len(most), dtype=bool)
    paths = _Paths.of(snapshot, path_order(snapshot), most, length, price, by_token)
    paths = None if paths is None else paths.that_may_gain()
    if paths is None:
        return shared
    is_top, is_node = np.zeros((2, len(most)), dtype=bool)
    is_top[paths.top], is_node[paths.node] = True, True
    level = mark(snapshot.subtree_end, is_top).above[paths.top]
    index = np.full(len(most) + 1, len(paths.node))
    index[paths.node] = np.arange(len(paths.node))
    above = index[mark(snapshot.subtree_end, is_node).nearest(paths.top)]  # the node that each path branches from
    spared = np.zeros(len(paths.node) + 1, dtype=np.int64)  # consumers that a node and those above it on its path lose
    for depth in range(int(level.max()), -1, -1):
        here = np.flatnonzero(level == depth)
        some = paths.some(here)
        some = some.without(spared[ranges(paths.first[here], paths.count[here])])
        begin, net = some.best()
        gains = net > 0
        left = np.where(gains, some.most[begin] - 1, 0)
        np.add.at(spared, above[here], paths.most[paths.first[here]] - some.most[some.first] + left)
        end = some.last_with_two()
        place = paths.place[ranges(paths.first[here], paths.count[here])]
        low, high = place[begin[gains]], place[end[gains]]
        shared[paths.order[ranges(low, high + 1 - low)]] = True
    return shared


def may_begin(
    snapshot: TreeSnapshot, most: Longs, length: Ints | Longs, price: NDArray[np.float64], by_token: float
) -> NDArray[np.bool_]:
    """``[nodes]`` True for the first node of each path at which a part may begin, whatever is decided for nodes below.

    Arguments are those of :func:`share_paths`.
    """
    begins = np.zeros(len(most), dtype=bool)
    paths = _Paths.of(snapshot, path_order(snapshot), most, length, price, by_token)
    if paths is not None:
        gains = np.where(paths.net() > 0, np.arange(len(paths.most)), len(paths.most))
        first = np.minimum.reduceat(gains, paths.first)
        begins[paths.node[first[first < len(paths.most)]]] = True
    return begins


@dataclass(frozen=True, eq=False)
class _Paths:
    """The nodes of each path that two or more consumers read, from the top down, path after path.

    Attributes:
        order: ``[all nodes]`` the nodes of the tree, path after path.
        place: ``[nodes]`` the index of each node in ``order``.
        most, length, price, by_token: As in :func:`share_paths`, for these nodes.
        first, count: ``[paths]`` the index of each path's first node, and its number of nodes.
    """

    order: Longs
    place: Longs
    most: Longs
    length: Ints | Longs
    price: NDArray[np.float64]
    by_token: float
    first: Longs
    count: Longs

    @staticmethod
    def of(
        snapshot: TreeSnapshot,
        order: Longs,
        most: Longs,
        length: Ints | Longs,
        price: NDArray[np.float64],
        by_token: float,
    ) -> _Paths | None:
        """The paths of a tree that have such nodes; None if no node is read twice."""
        place = np.flatnonzero((most > 1)[order])
        if not len(place):
            return None
        node = order[place]
        end = snapshot.subtree_end[node]
        first = np.flatnonzero(np.concatenate(([True], end[1:] != end[:-1])))
        count = np.diff(np.append(first, len(node)))
        return _Paths(order, place, most[node], length[node], price[node], by_token, first, count)

    @property
    def node(self) -> Longs:
        return self.order[self.place]

    @property
    def top(self) -> Longs:
        """``[paths]`` the first node of each path."""
        return self.order[self.place[self.first]]

    def some(self, paths: Longs) -> _Paths:
        """Some of the paths."""
        of, count = ranges(self.first[paths], self.count[paths]), self.count[paths]
        columns = self.place[of], self.most[of], self.length[of], self.price[of]
        return _Paths(self.order, *columns, self.by_token, np.cumsum(count) - count, count)

    def that_may_gain(self) -> _Paths | None:
        """The paths that gain while no node below is shared; with fewer consumers the others cannot gain either."""
        gains = np.flatnonzero(self.best()[1] > 0)
        return self.some(gains) if len(gains) else None

    def without(self, spared: Longs) -> _Paths:
        """The paths with fewer consumers: a node and the nodes above it on its path lose ``spared`` of them."""
        columns = self.place, self.most - self._from_here(spared), self.length, self.price
        return _Paths(self.order, *columns, self.by_token, self.first, self.count)

    def net(self) -> NDArray[np.float64]:
        """``[nodes]`` the gain of a shared part that begins with the node."""
        saved = self._from_here(np.multiply(np.maximum(self.most - 1, 0), self.length, dtype=np.int64))
        gains: NDArray[np.float64] = saved * self.by_token - self.price
        return gains

    def best(self) -> tuple[Longs, NDArray[np.float64]]:
        """``[paths]`` the node at which a shared part that gains most begins (the lowest of several), and the gain."""
        net = self.net()
        most: NDArray[np.float64] = np.maximum.reduceat(net, self.first)
        here = np.where(net == np.repeat(most, self.count), np.arange(len(net)), -1)
        return np.maximum.reduceat(here, self.first), most

    def last_with_two(self) -> Longs:
        """``[paths]`` the last node of each path that two or more consumers read, -1 if there is none."""
        return np.maximum.reduceat(np.where(self.most > 1, np.arange(len(self.most)), -1), self.first)

    def _from_here(self, values: Longs) -> Longs:
        """``[nodes]`` the sum of ``values`` from each node to its path's end."""
        total = np.cumsum(values)
        sums: Longs = np.repeat(total[self.first + self.count - 1], self.count) - total + values
        return sums
