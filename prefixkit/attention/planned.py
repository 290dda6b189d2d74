"""A plan where the ops take it, and what there is to know of it, found out when somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from prefixkit.attention.ancestry import Longs, mark
from prefixkit.attention.bsr import Queries
from prefixkit.attention.gpu_cost import NARROW_ROWS
from prefixkit.attention.gpu_plan import GpuPlan
from prefixkit.attention.plan import Plan
from prefixkit.attention.sharing import CostModel, HeadShape, decide_sharing
from prefixkit.tree.snapshot import Ints, TreeSnapshot


@dataclass(frozen=True, eq=False)
class Reads:
    """What a GPU's plan reads, known without the plan: each tile of a row reads all tokens of the row.

    A row reads its path down to its own node, from where the nearest shared node above it ends.

    Attributes:
        node: ``[rows]`` the node of each row, dense or causal.
        begin: ``[rows]`` the position from which it reads.
        tiles: ``[rows]`` how many tiles do.
    """

    node: Longs
    begin: Longs
    tiles: Longs

    @staticmethod
    def of(snapshot: TreeSnapshot, queries: Queries, shape: HeadShape, cost: CostModel) -> Reads:
        """The reads of plans for kernels of this cost."""
        own = queries.rows_per_node(snapshot.num_nodes)
        row_of_node = np.concatenate(([0], np.cumsum(own)))
        below = row_of_node[snapshot.subtree_end] - row_of_node[1:]
        shared = decide_sharing(snapshot, own, below, shape, cost)
        dense, causal = np.flatnonzero(shared), np.flatnonzero(own)
        node = np.concatenate((dense, causal))
        # A node's own queries and its dense row read the same path.
        nearest = mark(snapshot.subtree_end, shared).nearest(node)
        ends = np.concatenate((snapshot.start + snapshot.length, [0])).astype(np.int64)
        rows = np.concatenate((below[dense], own[causal]))
        full = -(-rows // max(1, cost.tile_heads // shape.group))
        return Reads(node, ends[nearest], np.where(rows * shape.group <= NARROW_ROWS, 1, full))

    def tokens(self, start: Ints, length: Ints) -> int:
        """Token KVs read in a run over all heads, when node ``n`` holds ``length[n]`` tokens from position ``start[n]``."""
        end = start[self.node].astype(np.int64) + length[self.node]
        return int((self.tiles * (end - self.begin)).sum())


@dataclass(eq=False)
class Planned:
    """A plan's tensors, and the plan itself: made before them on the host, or alike by a GPU, and then known on demand.

    Attributes:
        work: The plan's arrays as int32 tensors, in the order in which the ops take them.
        snapshot, queries: What was planned for.
        specify: Makes the plan of those on the host.
        read: Counts what it reads.
        made: That plan, if the host made it at once.
    """

    work: list[Tensor]
    snapshot: TreeSnapshot
    queries: Queries
    specify: Callable[[TreeSnapshot, Queries], Plan | GpuPlan]
    read: Callable[[TreeSnapshot, Queries], Reads]
    made: Plan | GpuPlan | None = None

    @cached_property
    def plan(self) -> Plan | GpuPlan:
        """The plan on the host, by the specification."""
        return self.made or self.specify(self.snapshot, self.queries)

    @cached_property
    def _reads(self) -> Reads:
        return self.read(self.snapshot, self.queries)

    def kv_tokens_read(self, length: Ints) -> int:
        """Token KVs that attention reads in one layer, when node ``n`` holds ``length[n]`` tokens."""
        if self.made is not None:
            return self.made.kv_tokens_read(length)
        return self._reads.tokens(self.snapshot.start, length)
