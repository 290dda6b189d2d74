"""Chains of short nodes, which remain of beams that forked at almost every step and of which one has survived."""

from __future__ import annotations

from collections.abc import Iterator

from prefixkit.tree.node import Node

# Nodes of the shortest chain: fewer are not worth a copy, which ends in a page that is not full.
_FEWEST_NODES = 6


def chains(root: Node, page_size: int) -> Iterator[list[Node]]:
    """Runs of computed inner nodes shorter than a page, each the only child of the one before; a page in all, or more.

    The tree may change in the nodes of a run that was yielded, and above them.
    """
    stack = root.children
    while stack:
        node, chain = stack.pop(), list[Node]()
        below = [node]
        while len(below) == 1 and _is_short(below[0], page_size):
            chain += below
            below = below[0].children
        stack += below if chain else node.children
        if len(chain) >= _FEWEST_NODES and sum(node.length for node in chain) >= page_size:
            yield chain


def _is_short(node: Node, page_size: int) -> bool:
    ends = node.sequences or node.cached  # sequences, and what the prefix cache retains, end with a node
    return node.length < page_size and node.computed == node.length and not ends
