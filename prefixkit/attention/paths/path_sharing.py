"""Which nodes of heavy paths are worth sharing: of each path one part, whose nodes are read as one list.

The part begins where it gains most and ends where fewer than two consumers remain: going on for longer costs no further
partial state.  Sums of tokens are whole numbers, so that their order does not matter.
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
    """Decide path by path, from those that no other hangs on up.

    Args:
        snapshot: The tree.
        most: ``[nodes]`` consumers of each node if nothing below is shared.
        length: ``[nodes]`` tokens that each of these but one does not read if the node is shared.
        price: ``[nodes]`` what a shared part costs that begins with the node.
        by_token: What reading a token costs.

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
    above = index[mark(snapshot.subtree_end, is_node).nearest(paths.top)]  # where each hangs
    spared = np.zeros(len(paths.node) + 1, dtype=np.int64)  # consumers of a node and those above it on its path
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
    """``[nodes]`` True for the first node of each path with which a part may begin, whatever is decided below it.

    Arguments are as :func:`share_paths` has them.
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
    """Paths, of each the nodes that two or more consumers read, laid end to end from the top down.

    Attributes:
        order: ``[all nodes]`` the nodes of the tree, path after path.
        place: ``[nodes]`` where in ``order`` each is.
        most, length, price, by_token: As :func:`share_paths` has them, of these nodes.
        first, count: ``[paths]`` where each begins, and how many nodes it has.
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
        """The paths of a tree that have such nodes; None where there are none."""
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
        """``[paths]`` the first node of each."""
        return self.order[self.place[self.first]]

    def some(self, paths: Longs) -> _Paths:
        """Some of the paths."""
        of, count = ranges(self.first[paths], self.count[paths]), self.count[paths]
        columns = self.place[of], self.most[of], self.length[of], self.price[of]
        return _Paths(self.order, *columns, self.by_token, np.cumsum(count) - count, count)

    def that_may_gain(self) -> _Paths | None:
        """The paths that gain if nothing below is shared: where that many consumers gain nothing, fewer do neither."""
        gains = np.flatnonzero(self.best()[1] > 0)
        return self.some(gains) if len(gains) else None

    def without(self, spared: Longs) -> _Paths:
        """The paths with fewer consumers: ``spared`` at a node are none of it, nor of those above it."""
        columns = self.place, self.most - self._from_here(spared), self.length, self.price
        return _Paths(self.order, *columns, self.by_token, self.first, self.count)

    def net(self) -> NDArray[np.float64]:
        """``[nodes]`` what a shared part gains that begins with each."""
        saved = self._from_here(np.multiply(np.maximum(self.most - 1, 0), self.length, dtype=np.int64))
        gains: NDArray[np.float64] = saved * self.by_token - self.price
        return gains

    def best(self) -> tuple[Longs, NDArray[np.float64]]:
        """``[paths]`` with which node a shared part gains most, the lowest such one, and how much."""
        net = self.net()
        most: NDArray[np.float64] = np.maximum.reduceat(net, self.first)
        here = np.where(net == np.repeat(most, self.count), np.arange(len(net)), -1)
        return np.maximum.reduceat(here, self.first), most

    def last_with_two(self) -> Longs:
        """``[paths]`` the last node of each that two consumers or more read, -1 where there is none."""
        return np.maximum.reduceat(np.where(self.most > 1, np.arange(len(self.most)), -1), self.first)

    def _from_here(self, values: Longs) -> Longs:
        """``[nodes]`` the sum from each to its path's end."""
        total = np.cumsum(values)
        sums: Longs = np.repeat(total[self.first + self.count - 1], self.count) - total + values
        return sums
