"""A step's tree without what none of its queries sees: for planners that read nodes from their first token on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prefixkit.attention.bsr import lowest_positions
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.visible import Visible
from prefixkit.tree.arrays import Ints


def unseen_tokens(tree: StepTree, visible: Visible) -> Ints:
    """``[nodes]`` tokens at the beginning of each node that no query in it or below it sees."""
    snapshot = tree.snapshot
    begin, end = tree.first_row[:-1], tree.first_row[snapshot.subtree_end]
    read = np.flatnonzero(end > begin)
    first = visible.begin(lowest_positions(tree.positions, begin[read], end[read]))
    unseen = np.zeros(snapshot.num_nodes, dtype=np.int32)
    unseen[read] = np.clip(first - snapshot.start[read], 0, snapshot.length[read])
    return unseen


def trimmed(tree: StepTree, unseen: Ints) -> StepTree:
    """The same queries over nodes without their first ``unseen`` tokens, whose pages stay as they are."""
    old, queries = tree.snapshot, tree.queries
    snapshot = replace(
        old,
        start=old.start + unseen,
        length=old.length - unseen,
        computed=np.maximum(old.computed - unseen, 0),
        first_slot=old.first_slot + unseen,
    )
    cut = unseen[queries.node]
    return StepTree(snapshot, Queries(queries.node, queries.begin - cut, queries.end - cut))
