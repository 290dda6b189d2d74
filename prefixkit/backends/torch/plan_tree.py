"""``plan_tree`` by the specification, on the host; see the op for its contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prefixkit.attention.bsr import decompose_unchecked
from prefixkit.attention.gpu.capacity import OVERFLOW
from prefixkit.attention.gpu.gpu_cost import GpuCost
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.tree.arrays import Ints
from prefixkit.tree.snapshot import TreeSnapshot


def plan_tree(*arguments: Any) -> None:
    """``plan_tree``."""
    num_nodes, parent, subtree_end, length, own_rows, *work, _, heads, num_sms, cost = arguments
    counts = work[0]
    nodes = int(num_nodes)
    counts.zero_()
    counts[OVERFLOW] = 1
    if nodes > len(parent):
        return
    tree = _tree(*(array[:nodes].cpu().numpy() for array in (parent, subtree_end, length)))
    rows = own_rows[:nodes].cpu().numpy()
    node = np.flatnonzero(rows).astype(np.int32)
    queries = Queries(node, (tree.length - rows)[node], tree.length[node])
    counts[2] = queries.num_rows
    shape, gpu = HeadShape(*heads), GpuCost.of(cost)
    formats = [decompose_unchecked(StepTree(tree, queries), shape, gpu.sharing)]
    plan = make_gpu_plan(formats, tree.length, queries.num_rows, shape, num_sms, gpu)
    made = list(zip(work, plan.arrays(), strict=True))
    if all(len(array) <= len(target) for target, array in made):
        for target, array in made:
            target[: len(array)] = torch.from_numpy(array)


def _tree(parent: Ints, subtree_end: Ints, length: Ints) -> TreeSnapshot:
    """A tree of these nodes, all of whose visible tokens have KV.  Plans depend on neither positions nor pages."""
    nothing = np.zeros(len(parent) + 1, dtype=np.int32)
    return TreeSnapshot(
        version=0,
        page_size=1,
        parent=parent,
        subtree_end=subtree_end,
        start=nothing[1:],
        length=length,
        computed=length,
        first_slot=nothing[1:],
        page_indptr=nothing,
        pages=nothing[:0],
        sequence_node=nothing[:0],
        sequence_id=np.zeros(0, dtype=np.int64),
    )
