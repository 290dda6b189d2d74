"""Dropping tokens in the middle of a sequence that no query sees any more, to release their pages."""

from __future__ import annotations

from prefixkit.tree.changes.edits import TreeEdits
from prefixkit.tree.node import Node
from prefixkit.tree.sequence import Sequence, check_live


def drop_between(tree: TreeEdits, sequence: Sequence, begin: int, end: int) -> int:
    """Drop tokens of a sequence at positions ``[begin, end)`` that fill whole pages, and release these pages.

    Only tokens with KV in a leaf of the sequence's own are dropped, and never the leaf's last token: tokens that other
    sequences share or the prefix cache retains stay.  The sequence keeps its length and positions.  No match finds the
    tokens behind the gap, and :meth:`PrefixTree.retain` does not retain them.

    Returns:
        How many pages became free.

    Raises:
        ValueError: the sequence is not live in this tree.
    """
    check_live(tree, sequence)
    node, size, free = sequence.node, tree.page_size, tree.allocator.free
    if not node.appends(0) or node.pins:
        return 0
    kept = max(begin - node.start, 0)  # tokens before the dropped ones
    last = (
        node.first_slot + min(end - node.start, node.computed, node.length - 1)
    ) // size  # the first page that stays
    whole = -(-(node.first_slot + kept) // size) if kept else int(node.previous_in_page is not None)
    if last <= whole:
        return 0
    if kept:
        last -= (node.first_slot + kept) // size  # pages before the lower half's first page
        tree.split(node, kept)
    tree.allocator.release(node.drop_front(last * size - node.first_slot))
    tree.version += 1
    return tree.allocator.free - free


def above_gaps(node: Node) -> Node:
    """The last node on the path from the root to ``node`` that lies above all gaps."""
    above = node
    while above.parent is not None:
        if above.behind_gap:
            node = above.parent
        above = above.parent
    return node
