"""Attention over latents in two parts: BSR rows that read latents as they are, and rows for which K and V are made.

Where K and V are linear in a cached latent c and rotary keys r, ``q K = (q A) [c; r]`` and ``P V = (P c) D``: a row may
attend over ``[c; r]`` with one KV head of ``latent + rotary`` elements and V = c (*absorbed*), or K and V of each token
are made first (*expanded*).  Few queries of many tokens are absorbed, many queries expanded (TyphoonMLA).
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

# A single query of its own node is mostly that of a decode step, whose plan stays while the leaf grows: it counts as if
# the leaf had this many tokens at least.
_GROWS_TO = 64


class Part(Enum):
    """How BSR rows over latents are computed."""

    EXPANDED = "expanded"
    ABSORBED = "absorbed"


@dataclass(frozen=True)
class LatentPart:
    """One of the two parts of attention over latents.  The parts of one step have each BSR row once.

    Attributes:
        part: Which of them.
        whole: The heads of K and V that latents expand to; as many KV heads as query heads.
        latent, rotary: Elements of a token's latent and of its rotary keys.
    """

    part: Part
    whole: HeadShape
    latent: int
    rotary: int

    @property
    def shape(self) -> HeadShape:
        """The heads that the part attends with."""
        if self.part is Part.EXPANDED:
            return self.whole
        return HeadShape(self.whole.heads, 1, self.latent + self.rotary, self.whole.itemsize, self.latent)

    def rows_of(self, tree: StepTree, cost: CostModel) -> PartRows:
        """The part's rows; ``cost`` decides what is shared, and must be that of the other part.

        Raises:
            ValueError: as :meth:`StepTree.check`.
        """
        bsr = decompose(tree, self.whole, cost)
        return PartRows.of(bsr, self.absorbs(bsr, tree) == (self.part is Part.ABSORBED), tree)

    def absorbs(self, bsr: BSR, tree: StepTree) -> NDArray[np.bool_]:
        """``[rows]`` which BSR rows take fewer multiplications absorbed.

        Making K and V of a token takes ``made`` for each head, and so does a query through the maps before and after:
        that counts for an own-node row, and for a shared-prefix row where its queries' own rows are expanded.
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
        bsr: The rows; they count the part's query rows alone.
        runs: ``[query runs]`` which of the step's runs of queries have one.
        index: ``[rows of the part]`` int64 the step's query rows that are the part's, ascending.
    """

    bsr: BSR
    runs: NDArray[np.bool_]
    index: NDArray[np.int64]

    @staticmethod
    def of(bsr: BSR, mine: NDArray[np.bool_], tree: StepTree) -> PartRows:
        """Some of the BSR rows of a step."""
        queries = tree.queries
        first = np.cumsum(queries.end - queries.begin) - (queries.end - queries.begin)
        change = np.bincount(bsr.q_begin[mine], minlength=queries.num_rows + 1)
        change -= np.bincount(bsr.q_end[mine], minlength=queries.num_rows + 1)
        runs = np.cumsum(change)[first] > 0  # a BSR row has all queries of a node, or none
        index = ranges(first[runs], (queries.end - queries.begin)[runs])
        before = np.zeros(queries.num_rows + 1, dtype=np.int64)
        before[index + 1] = 1
        return PartRows(_selected(bsr, mine, np.cumsum(before)), runs, index)

    def over(self, tree: StepTree) -> PartRows:
        """The same rows, but they count all query rows of the step."""
        index = np.append(self.index, len(self.index) and self.index[-1] + 1)
        bsr = self.bsr
        # A BSR row's queries are neighbours in the step too.
        q_begin = index[bsr.q_begin]
        bsr = replace(bsr, q_begin=q_begin.astype(np.int32), q_end=(q_begin + bsr.q_end - bsr.q_begin).astype(np.int32))
        return PartRows(bsr, np.ones_like(self.runs), np.arange(tree.queries.num_rows))

    def tree(self, tree: StepTree) -> StepTree:
        """The step's tree with the part's queries alone."""
        queries = tree.queries
        # KV that the other queries of the step append exists for these too.
        snapshot = replace(tree.snapshot, computed=tree.length)
        return StepTree(snapshot, Queries(*(of[self.runs] for of in (queries.node, queries.begin, queries.end))))


def _selected(bsr: BSR, mine: NDArray[np.bool_], before: NDArray[np.int64]) -> BSR:
    """Some of the rows, with query rows counted by ``before``."""
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
