"""Match a token array against a tree, and join siblings with a common prefix so that a match finds all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.changes.edits import TreeEdits
from prefixkit.tree.node import Node
from prefixkit.tree.tokens import common_prefix


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a token array that a tree holds.

    Attributes:
        node: the deepest node touched; the root where nothing matched.
        offset: tokens matched inside ``node``; if less than ``node.length``, an insertion would split the node there.
        length: tokens matched in all.
    """

    node: Node
    offset: int
    length: int


def follow(root: Node, tokens: NDArray[np.int32]) -> Match:
    """Walk down from ``root`` for as long as ``tokens`` agree.  Changes nothing.  O(tokens)."""
    node, offset, matched = root, 0, 0
    while offset == node.length and matched < len(tokens):
        siblings = node.branches.get(int(tokens[matched]))
        if siblings is None:
            break
        node = siblings[0]
        # The first token is the branch's key: a node of one token needs no comparison.
        offset = 1 if node.length == 1 else common_prefix(node.tokens, tokens[matched:])
        matched += offset
    return Match(node, offset, matched)


def join(tree: TreeEdits, node: Node) -> Node:
    """Share the common prefix of ``node`` and a sibling, so that a match finds all of it; KV is not moved.

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
    """A sibling with the same first tokens as ``node``, and how many of these are computed in both."""
    assert node.parent is not None, "the root has no siblings"
    siblings = node.parent.branches[node.key]  # the node itself among them
    for sibling in siblings if len(siblings) > 1 else ():
        no_longer_grows = sibling.cached or sibling.branches
        if sibling is not node and no_longer_grows and sibling.computed and node.computed:
            shared = common_prefix(sibling.tokens, node.tokens)
            return sibling, min(shared, sibling.computed, node.computed)
    return None
