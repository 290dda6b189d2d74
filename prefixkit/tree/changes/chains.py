"""Chains of short nodes, which a surviving beam leaves after beams forked at almost every step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from prefixkit.tree.arrays import Longs
from prefixkit.tree.changes.edits import TreeEdits
from prefixkit.tree.node import Node

_NODES_A_PAGE = 3  # a copy may take one page more than it frees for every three nodes that it removes

# Fewest nodes of a chain: shorter ones are not worth a copy, which ends in a partly filled page.
_FEWEST_NODES = 6


def chains(root: Node, page_size: int) -> Iterator[list[Node]]:
    """Runs of computed inner nodes shorter than a page, each the only child of the one before; a page or more in all.

    The caller may change the nodes of the run it was given, and the nodes above them.
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
    ends = node.sequences or node.cached  # sequences and retained prefixes must end at a node's end
    return node.length < page_size and node.computed == node.length and not ends and not node.behind_gap


def compact(tree: TreeEdits, most_pages: int) -> tuple[Longs, Longs]:
    """Replace each long chain of short nodes, which beams leave, by one node: steps take longer in deep trees.

    ``most_pages`` pages are free and not reserved.

    Returns:
        Source and target slots of the KV that the caller must copy, in this order, before the next step: a later
        target may be an earlier source.
    """
    source, target = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for chain in chains(tree.root, tree.page_size):
        parent, tokens = chain[0].parent, np.concatenate([node.tokens for node in chain])
        assert parent is not None, "the root is in no chain"
        donor = parent if parent.free_slots else None
        need = tree.new_pages(donor, len(tokens), 0)
        held, holders = np.unique(np.concatenate([each.pages for each in chain]), return_counts=True)
        freed = int((tree.allocator.refcounts[held] == holders).sum())
        if need > most_pages or need > freed + len(chain) // _NODES_A_PAGE:
            continue
        most_pages -= need - freed
        node = tree.add_leaf(parent, tokens, tree.allocator.allocate(need), donor)
        node.computed, node.state = len(tokens), chain[-1].state
        source += [each.slots for each in chain]
        target.append(node.slots)
        for above, each in pairwise([parent, *chain]):
            above.disown(each)
            tree.allocator.release(each.pages)
        for child in chain[-1].children:
            node.adopt(child)
        tree.merge(node)
        tree.merge(parent)
    return np.concatenate(source), np.concatenate(target)
