"""A step's tree without the tokens that none of its queries sees: for planners that read whole nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.visible import Visible, lowest_positions
from prefixkit.tree.arrays import Ints


def unseen_tokens(tree: StepTree, visible: Visible) -> Ints:
    """``[nodes]`` tokens at the beginning of each node that no query in it or below it sees."""
    snapshot = tree.snapshot
    begin, end = tree.first_row[:-1], tree.first_row[snapshot.subtree_end]
    read = np.flatnonzero(end > begin)
    first = visible.begin(lowest_positions(tree.positions, begin[read], end[read]))
    unseen = np.zeros(snapshot.num_nodes, dtype=np.int32)
    # A leaf that is yet to grow into the visible range has more unseen tokens than tokens.
    most = np.where(tree.own_rows[read] > 0, np.iinfo(np.int32).max, snapshot.length[read])
    unseen[read] = np.clip(first - snapshot.start[read], 0, most)
    return unseen


def trimmed(tree: StepTree, unseen: Ints, until: int | None = None) -> StepTree:
    """The same queries over nodes without their first ``unseen`` tokens, and without tokens at position ``until`` or
    later; pages stay as they are.  Query rows are at the ends of the trimmed nodes, whatever their positions.
    """
    old, queries = tree.snapshot, tree.queries
    far = np.full(old.num_nodes, np.iinfo(np.int32).max, np.int32)
    most = far if until is None else np.maximum(until - old.start, 0)
    snapshot = replace(
        old,
        start=old.start + unseen,
        length=_left(old.length, unseen, most),
        computed=_left(old.computed, unseen, most),
        first_slot=old.first_slot + unseen,
    )
    at = queries.node
    end = _left(queries.end, unseen[at], most[at])
    return StepTree(snapshot, Queries(at, end - (queries.end - queries.begin), end))


def _left(tokens: Ints, unseen: Ints, most: Ints) -> Ints:
    left: Ints = np.clip(tokens - unseen, 0, most)
    return left
