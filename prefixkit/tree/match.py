"""How far a token array can be followed into a tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.node import Node
from prefixkit.tree.tokens import common_prefix


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a token array that a tree holds.

    Attributes:
        node: the deepest node touched; the root where nothing matched.
        offset: tokens matched inside ``node``; below ``node.length``, an insertion would split it there.
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
