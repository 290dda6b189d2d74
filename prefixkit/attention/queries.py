"""The query rows of one step, and the tree that they attend over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.ancestry import marked_above
from prefixkit.attention.paths.runs import Runs, runs_of
from prefixkit.tree.arrays import Ints, indptr_of, ranges
from prefixkit.tree.snapshot import TreeSnapshot

UNNUMBERED = (
    "the variant reads b, the number of a query's sequence, but the queries have none; give Queries.sequence, a number "
    "for each run of queries"
)

# A tree counts as deep if a query has more than DEEP ancestors that each are above several nodes with queries, and all
# query rows together have more of them than MANY: each row has a partial state from each.  With fewer partial states,
# a plan by heavy paths takes the host and the GPU longer than it spares in attention (32 beams, H200).
DEEP, MANY = 8, 512


class UnnumberedSequences(ValueError):
    """A variant reads sequence numbers, but the queries have none."""


@dataclass(frozen=True, eq=False)
class Queries:
    """The query rows of one step: run ``r`` is tokens ``[begin[r], end[r])`` of node ``node[r]``.

    Runs are in depth-first order with one run per node at most; the rows of the step are the runs laid end to end.
    ``sequence``: the number of each run's sequence, for variants that read it; None if none does.
    """

    node: Ints
    begin: Ints
    end: Ints
    sequence: Ints | None = None

    @cached_property
    def num_rows(self) -> int:
        return int((self.end - self.begin).sum())

    def row_node(self) -> Ints:
        """``[rows]`` the node of each row."""
        return np.repeat(self.node, self.end - self.begin)

    def row_offset(self) -> Ints:
        """``[rows]`` the offset of each row's token in its node."""
        return ranges(self.begin, self.end - self.begin).astype(np.int32)


@dataclass(frozen=True, eq=False)
class StepTree:
    """A tree and the query rows of one step over it: what a plan is made for.

    Attributes:
        snapshot, queries: The tree and the query rows.
        later: ``[rows]`` how many later tokens of its node each row may see, under variants that look ahead; None: all
            with KV.
        last: The highest position that query rows attend from (:class:`Visible`); None: each row's own.
        full: ``[rows]`` of a decode step made by :meth:`grown`, whether the leaf's pages have no slot for the row's
            token: the row, whose sample has ended, stays at the token before, and writes nothing.  None: all have one.
    """

    snapshot: TreeSnapshot
    queries: Queries
    later: Ints | None = None
    last: int | None = None
    full: NDArray[np.bool_] | None = None

    @cached_property
    def own_rows(self) -> Ints:
        """``[nodes]`` query rows in each node."""
        rows = np.zeros(self.snapshot.num_nodes, dtype=np.int32)
        rows[self.queries.node] = self.queries.end - self.queries.begin
        return rows

    @cached_property
    def first_row(self) -> Ints:
        """``[nodes + 1]`` the first query row of each node, and their total; rows below a node are consecutive."""
        first = np.zeros(len(self.own_rows) + 1, np.int32)
        np.cumsum(self.own_rows, out=first[1:])
        return first

    @cached_property
    def below(self) -> Ints:
        """``[nodes]`` query rows in each node's proper descendants."""
        below: Ints = self.first_row[self.snapshot.subtree_end] - self.first_row[1:]
        return below

    @cached_property
    def depth(self) -> Ints:
        """``[nodes]`` the number of ancestors of each node."""
        return self.snapshot.depth()

    @cached_property
    def is_deep(self) -> bool:
        """Whether a query has more than :data:`DEEP` ancestors above several nodes with queries, and all rows together
        more than ``MANY``.
        """
        snapshot, queries = self.snapshot, self.queries
        if not _many(self.depth[queries.node], queries):
            return False
        owners = np.concatenate(([0], np.cumsum(self.own_rows > 0)))
        forks = (owners[snapshot.subtree_end] - owners[1:] > 1) & (snapshot.length > 0)
        return _many(marked_above(snapshot.subtree_end, forks)[queries.node], queries)

    @cached_property
    def runs(self) -> Runs | None:
        """The runs of a deep tree, which plans by paths number after its nodes; None for other trees."""
        return runs_of(self.snapshot) if self.is_deep else None

    @cached_property
    def length(self) -> Ints:
        """``[nodes]`` tokens of each node that have KV once the step has appended its KV."""
        visible = self.snapshot.computed.copy()
        visible[self.queries.node] = np.maximum(visible[self.queries.node], self.queries.end)
        return visible

    def arrays(self) -> tuple[Ints, ...]:
        """The node arrays that kernels take: start, visible length, page_indptr, pages, first_slot; int32."""
        tree = self.snapshot
        return tree.start, self.length, tree.page_indptr, tree.pages, tree.first_slot

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """``[rows]`` the position of each query row in its sequence, or ``last`` if that is lower."""
        own = self.snapshot.start[self.queries.row_node()].astype(np.int64) + self.queries.row_offset()
        return own if self.last is None else np.minimum(own, self.last)

    @cached_property
    def reach(self) -> NDArray[np.int64]:
        """``[rows]`` the last position that each query row may see under a variant that looks ahead."""
        if self.later is not None:
            return self.positions + self.later
        node = self.queries.row_node()
        return self.snapshot.start[node].astype(np.int64) + self.length[node] - 1

    @property
    def is_unbounded(self) -> bool:
        """Whether some row may see tokens after its own, with no ``later`` that bounds them."""
        return self.later is None and bool((self.reach > self.positions).any())

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """``[rows]`` the number of each query row's sequence; 0 if sequences have no numbers."""
        queries = self.queries
        if queries.sequence is None:
            return np.zeros(queries.num_rows, dtype=np.int64)
        return np.repeat(queries.sequence.astype(np.int64), queries.end - queries.begin)

    def last_rows(self) -> NDArray[np.int64]:
        """``[nodes]`` the query row of each node's last token, -1 if that token does not run."""
        rows = np.full(self.snapshot.num_nodes, -1, dtype=np.int64)
        queries = self.queries
        complete = queries.end == self.snapshot.length[queries.node]
        rows[queries.node[complete]] = np.cumsum(queries.end - queries.begin)[complete] - 1
        return rows

    # -- decode steps: every query is the last token of a leaf ---------------------------------------------------------

    def grown(self, steps: int) -> StepTree:
        """The decode step ``steps`` steps later; leaves whose pages are full stay as they are."""
        tree, leaf = self.snapshot, self.queries.node
        capacity = np.diff(tree.page_indptr)[leaf] * tree.page_size - tree.first_slot[leaf]
        length, computed = tree.length.copy(), tree.computed.copy()
        full = length[leaf] + steps > capacity
        length[leaf] = np.minimum(length[leaf] + steps, capacity)
        computed[leaf] = np.minimum(computed[leaf] + steps, capacity)
        return decode_tree(replace(tree, length=length, computed=computed), leaf, self.queries.sequence, full)

    def select_rows(self, rows: NDArray[np.intp]) -> StepTree:
        """The decode step of only these rows, ascending, without the other leaves.  Its snapshot has no sequences."""
        old, leaf = self.snapshot, self.queries.node
        stays = np.ones(old.num_nodes, dtype=bool)
        stays[leaf] = False
        stays[leaf[rows]] = True
        before = np.concatenate(([0], np.cumsum(stays))).astype(np.int32)  # how many nodes before each one stay
        held = np.diff(old.page_indptr)
        snapshot = replace(
            old,
            tree=object(),  # another identity: plans of the whole tree do not fit
            parent=np.where(old.parent >= 0, before[old.parent], -1).astype(np.int32)[stays],
            subtree_end=before[old.subtree_end[stays]],
            page_indptr=indptr_of(held[stays]),
            pages=old.pages[np.repeat(stays, held)],
            start=old.start[stays],
            length=old.length[stays],
            computed=old.computed[stays],
            first_slot=old.first_slot[stays],
            content=None if old.content is None else old.content[stays],
            sequence_node=old.sequence_node[:0],
            sequence_id=old.sequence_id[:0],
        )
        sequence, full = self.queries.sequence, None if self.full is None else self.full[rows]
        return decode_tree(snapshot, before[leaf[rows]], None if sequence is None else sequence[rows], full)

    def check(self) -> None:
        """Raise ValueError unless the runs are in order, lie inside their nodes, and miss no KV before them."""
        snapshot, node, begin, end = self.snapshot, self.queries.node, self.queries.begin, self.queries.end
        if len(node) == 0:
            raise ValueError("a step needs at least one query, got none")
        if np.any(node[1:] <= node[:-1]) or node[0] < 0 or node[-1] >= snapshot.num_nodes:
            raise ValueError(
                f"query runs must name nodes 0..{snapshot.num_nodes - 1} in ascending order, got {node.tolist()}"
            )
        if np.any(begin < 0) or np.any(begin >= end) or np.any(end > snapshot.length[node]):
            raise ValueError("each query run must be a non-empty slice of its node's tokens")
        if np.any(begin > snapshot.computed[node]):
            bad = int(node[np.argmax(begin > snapshot.computed[node])])
            raise ValueError(
                f"node {bad}: a query run must begin where the KV is complete, at {snapshot.computed[bad]} or before"
            )
        incomplete = (self.length < snapshot.length) & (self.below > 0)
        if np.any(incomplete):
            bad = int(np.argmax(incomplete))
            raise ValueError(
                f"node {bad} has KV for fewer than its {snapshot.length[bad]} tokens, but queries sit below it: "
                "compute ancestors first or in the same step"
            )


def _many(above: NDArray[np.integer], queries: Queries) -> bool:
    """Whether a run of queries has more than :data:`DEEP` of some ancestors, and all rows together more than ``MANY``;
    ``above [runs]``: how many each run has.
    """
    return bool(above.max(initial=0) > DEEP) and int(above @ (queries.end - queries.begin)) > MANY


def decode_tree(
    snapshot: TreeSnapshot, leaf: Ints, sequence: Ints | None = None, full: NDArray[np.bool_] | None = None
) -> StepTree:
    """A tree whose query rows are the last tokens of these leaves, ascending; ``full`` as in :class:`StepTree`."""
    end = snapshot.length[leaf]
    return StepTree(snapshot, Queries(leaf, end - 1, end, sequence), full=full)
