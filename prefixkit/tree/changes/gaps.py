"""Tokens in the middle of a sequence that no query sees any more: their pages are given back."""

from __future__ import annotations

from prefixkit.tree.changes.edits import TreeEdits
from prefixkit.tree.node import Node
from prefixkit.tree.sequence import Sequence, check_live


def drop_between(tree: TreeEdits, sequence: Sequence, begin: int, end: int) -> int:
    """Forget the tokens of a sequence at positions ``[begin, end)``, as far as they fill pages, and release these.

    Only those go that lie in a leaf of the sequence's own, have KV, and are followed by another one there: what other
    sequences share, and the prefix cache retains, stays.  The sequence keeps its length and positions.  Its tokens
    behind the gap are found by no match, and :meth:`PrefixTree.retain` retains none of them.

    Returns:
        How many pages are free again.

    Raises:
        ValueError: the sequence is not live in this tree.
    """
    check_live(tree, sequence)
    node, size, free = sequence.node, tree.page_size, tree.allocator.free
    if not node.appends(0) or node.pins:
        return 0
    kept = max(begin - node.start, 0)  # tokens before those that go
    last = (
        node.first_slot + min(end - node.start, node.computed, node.length - 1)
    ) // size  # the first page that stays
    whole = -(-(node.first_slot + kept) // size) if kept else int(node.previous_in_page is not None)
    if last <= whole:
        return 0
    if kept:
        last -= (node.first_slot + kept) // size  # pages of the upper half alone
        tree.split(node, kept)
    tree.allocator.release(node.drop_front(last * size - node.first_slot))
    tree.version += 1
    return tree.allocator.free - free


def above_gaps(node: Node) -> Node:
    """The last node above which nothing is gone, on the way from the root to a node."""
    above = node
    while above.parent is not None:
        if above.behind_gap:
            node = above.parent
        above = above.parent
    return node
