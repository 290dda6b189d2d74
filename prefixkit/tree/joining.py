"""Make one node of what two siblings both hold: samples of a prompt may begin alike."""

from __future__ import annotations

from prefixkit.tree.edits import TreeEdits
from prefixkit.tree.node import Node
from prefixkit.tree.tokens import common_prefix


def join(tree: TreeEdits, node: Node) -> Node:
    """Share what ``node`` and a sibling begin with, so that matching finds all of it; KV is not moved.

    A sibling that a sequence still extends stays apart, for it may hold reserved pages.

    Returns:
        The node where the tokens of ``node`` end afterwards.
    """
    while (found := _alike(node)) is not None:
        sibling, shared = found
        upper = tree.split(sibling, shared) if shared < sibling.length else sibling
        own = tree.split(node, shared) if shared < node.length else node
        if own is node:
            tree.replace(node, upper)
            return upper
        tree.replace(own, upper)
    return node


def _alike(node: Node) -> tuple[Node, int] | None:
    """A sibling that begins as ``node`` does, and with how many computed tokens."""
    assert node.parent is not None, "the root has no siblings"
    group = node.parent.branches[int(node.tokens[0])]
    for sibling in group if len(group) > 1 else ():
        at_rest = sibling.cached or sibling.branches
        if sibling is not node and at_rest and sibling.computed and node.computed:
            shared = common_prefix(sibling.tokens, node.tokens)
            return sibling, min(shared, sibling.computed, node.computed)
    return None
