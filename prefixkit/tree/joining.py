"""Join the common prefix of two siblings in one node: samples of a prompt may begin alike."""

from __future__ import annotations

from prefixkit.tree.edits import TreeEdits
from prefixkit.tree.node import Node
from prefixkit.tree.tokens import common_prefix


def join(tree: TreeEdits, node: Node) -> Node:
    """Share the common prefix of ``node`` and a sibling, so that matching finds all of it; KV is not moved.

    A sibling that a sequence still extends stays apart, for it may hold reserved pages.

    Returns:
        The node where the tokens of ``node`` end afterwards.
    """
    while (match := _alike(node)) is not None:
        sibling, shared = match
        upper = tree.split(sibling, shared) if shared < sibling.length else sibling
        duplicate = tree.split(node, shared) if shared < node.length else node
        tree.replace(duplicate, upper)
        if duplicate is node:
            return upper
    return node


def _alike(node: Node) -> tuple[Node, int] | None:
    """A sibling that begins as ``node`` does, and with how many computed tokens."""
    assert node.parent is not None, "the root has no siblings"
    siblings = node.parent.branches[int(node.tokens[0])]  # the node itself among them
    for sibling in siblings if len(siblings) > 1 else ():
        no_longer_grows = sibling.cached or sibling.branches
        if sibling is not node and no_longer_grows and sibling.computed and node.computed:
            shared = common_prefix(sibling.tokens, node.tokens)
            return sibling, min(shared, sibling.computed, node.computed)
    return None
