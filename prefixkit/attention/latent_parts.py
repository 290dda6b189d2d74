"""Attention over latents in two parts: BSR rows that read the latents, and rows for which K and V are made.

If K and V are linear in a cached latent c and rotary keys r, ``q K = (q A) [c; r]`` and ``P V = (P c) D``.  A row may
then attend over ``[c; r]`` with one KV head of ``latent + rotary`` elements and V = c (*absorbed*), or K and V of each
token are made first (*expanded*).  Rows of few queries and many tokens are absorbed, rows of many queries expanded
(TyphoonMLA).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import BSR, decompose
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CostModel, HeadShape
from prefixkit.tree.arrays import indptr_of, ranges

# A node with a single query is mostly a leaf in a decode step, whose plan stays in use while the leaf grows: costs are
# those of a leaf with at least this many tokens.
_GROWS_TO = 64


class Part(Enum):
    """How BSR rows over latents are computed."""

    EXPANDED = "expanded"
    ABSORBED = "absorbed"


@dataclass(frozen=True)
class LatentPart:
    """One of the two parts of attention over latents.  Each BSR row of a step is in exactly one part.

    Attributes:
        part: Which part.
        whole: The shape of K and V that latents expand to; it has as many KV heads as query heads.
        latent, rotary: Elements of a token's latent and of its rotary keys.
    """

    part: Part
    whole: HeadShape
    latent: int
    rotary: int

    @property
    def shape(self) -> HeadShape:
        """The head shape with which the part attends."""
        if self.part is Part.EXPANDED:
            return self.whole
        return HeadShape(self.whole.heads, 1, self.latent + self.rotary, self.whole.itemsize, self.latent)

    def rows_of(self, tree: StepTree, cost: CostModel) -> PartRows:
        """The part's rows; ``cost`` decides what is shared, and must be the same for both parts.

        Raises:
            ValueError: as :meth:`StepTree.check`.
        """
        bsr = decompose(tree, self.whole, cost)
        return PartRows.of(bsr, self.absorbs(bsr, tree) == (self.part is Part.ABSORBED), tree)

    def absorbs(self, bsr: BSR, tree: StepTree) -> NDArray[np.bool_]:
        """``[rows]`` True for BSR rows that need fewer multiplications absorbed than expanded.

        Making K and V of a token takes ``made`` multiplications per head.  Mapping a query by A and its output by D
        takes as many, which count for an own-node row, and for a shared-prefix row whose queries' own-node rows are
        expanded.
        """
        whole = self.whole
        made = self.latent * (whole.head_dim - self.rotary + whole.value_dim)
        queries = (bsr.q_end - bsr.q_begin).astype(np.int64)
        seen = np.minimum(bsr.end, tree.length[bsr.node]).astype(np.int64) - bsr.begin
        tokens = np.add.reduceat(seen, bsr.indptr[:-1])
        tokens = np.where(bsr.causal & (queries == 1), np.maximum(tokens, _GROWS_TO), tokens)
        pairs = queries * tokens - np.where(bsr.causal, queries * (queries - 1) // 2, 0)
        expanded = pairs * (whole.head_dim + whole.value_dim) + tokens * made
        absorbed = pairs * (2 * self.latent + self.rotary)
        own: NDArray[np.bool_] = bsr.causal & (absorbed + queries * made < expanded)
        through = np.ones(tree.queries.num_rows, dtype=np.int64)
        through[ranges(bsr.q_begin[own], queries[own])] = 0
        through = np.concatenate(([0], np.cumsum(through)))
        absorbed += (through[bsr.q_end] - through[bsr.q_begin]) * made
        shared: NDArray[np.bool_] = ~bsr.causal & (absorbed < expanded)
        return own | shared


@dataclass(frozen=True, eq=False)
class PartRows:
    """The BSR rows of a part.

    Attributes:
        bsr: The rows; their query rows are numbered within the part.
        runs: ``[query runs]`` True for the step's runs of queries that have a row in the part.
        index: ``[rows of the part]`` int64 the step's query rows that belong to the part, ascending.
    """

    bsr: BSR
    runs: NDArray[np.bool_]
    index: NDArray[np.int64]

    @staticmethod
    def of(bsr: BSR, mine: NDArray[np.bool_], tree: StepTree) -> PartRows:
        """The BSR rows of a step where ``mine`` is True."""
        queries = tree.queries
        first = np.cumsum(queries.end - queries.begin) - (queries.end - queries.begin)
        change = np.bincount(bsr.q_begin[mine], minlength=queries.num_rows + 1)
        change -= np.bincount(bsr.q_end[mine], minlength=queries.num_rows + 1)
        runs = np.cumsum(change)[first] > 0  # a BSR row has all or none of a node's queries
        index = ranges(first[runs], (queries.end - queries.begin)[runs])
        before = np.zeros(queries.num_rows + 1, dtype=np.int64)
        before[index + 1] = 1
        return PartRows(_selected(bsr, mine, np.cumsum(before)), runs, index)

    def over(self, tree: StepTree) -> PartRows:
        """The same rows, with query rows numbered within the step."""
        index = np.append(self.index, len(self.index) and self.index[-1] + 1)
        bsr = self.bsr
        # A BSR row's queries are consecutive in the step too.
        q_begin = index[bsr.q_begin]
        bsr = replace(bsr, q_begin=q_begin.astype(np.int32), q_end=(q_begin + bsr.q_end - bsr.q_begin).astype(np.int32))
        return PartRows(bsr, np.ones_like(self.runs), np.arange(tree.queries.num_rows))

    def tree(self, tree: StepTree) -> StepTree:
        """The step's tree with only the part's queries."""
        queries = tree.queries
        # KV that the step's other queries append exists for the part's queries too.
        snapshot = replace(tree.snapshot, computed=tree.length)
        return StepTree(snapshot, Queries(*(of[self.runs] for of in (queries.node, queries.begin, queries.end))))


def _selected(bsr: BSR, mine: NDArray[np.bool_], before: NDArray[np.int64]) -> BSR:
    """The BSR rows where ``mine`` is True, with query rows renumbered by ``before``."""
    count = np.diff(bsr.indptr)
    segments = ranges(bsr.indptr[:-1][mine], count[mine])
    return BSR(
        q_begin=before[bsr.q_begin[mine]].astype(np.int32),
        q_end=before[bsr.q_end[mine]].astype(np.int32),
        kind=bsr.kind[mine],
        indptr=indptr_of(count[mine]),
        node=bsr.node[segments],
        begin=bsr.begin[segments],
        end=bsr.end[segments],
        first=bsr.first[mine],
        last=bsr.last[mine],
    )
