"""The rows of a drawing of a tree, as plain data; the command line renders them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.node import Node
from prefixkit.tree.radix import PrefixTree


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One node of a drawing.

    Attributes:
        depth: nodes above it; 0 for the root of a tree of the forest.
        node: the node itself.
        shared_by: sequences that pass through it or end in it.
        ends: sequences that end exactly at its end.
        last: whether it is its parent's last child, which a drawing ends with a corner.
        tokens: ``[node.length]`` token ids.
    """

    depth: int
    node: Node
    shared_by: int
    ends: int
    last: bool
    tokens: NDArray[np.int32]


def rows(tree: PrefixTree) -> Iterator[Row]:
    """The nodes of ``tree`` from top to bottom, depth first.  Read them before the tree changes."""
    snapshot, nodes = tree.snapshot(), tree.nodes()
    depth, shared_by = snapshot.depth().tolist(), snapshot.shared_by().tolist()
    # A last child's subtree ends where its parent's does; a last root's, where the forest does.
    enclosing = np.append(snapshot.subtree_end, snapshot.num_nodes)[snapshot.parent]
    last = (snapshot.subtree_end == enclosing).tolist()
    for index, node in enumerate(nodes):
        yield Row(depth[index], node, shared_by[index], len(node.sequences), last[index], node.tokens)
