"""``plan_tree`` by the specification, on the host; see the op for its contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prefixkit.attention.bsr import decompose_unchecked
from prefixkit.attention.gpu.capacity import OVERFLOW
from prefixkit.attention.gpu.gpu_cost import GpuCost
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.paths.runs import Runs
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.visible import ALL, Visible
from prefixkit.tree.arrays import Ints
from prefixkit.tree.snapshot import TreeSnapshot


def plan_tree(*arguments: Any) -> None:
    """``plan_tree``."""
    sizes, parent, subtree_end, length, own_rows, start, run, *work, _, heads, num_sms, cost, seen = arguments
    counts = work[0]
    nodes, by_paths = sizes.tolist()
    paths = bool(by_paths and len(start))
    counts.zero_()
    counts[OVERFLOW] = 1
    if nodes > len(parent):
        return
    positions = start if paths else torch.zeros_like(parent)
    tree = _tree(*(array[:nodes].cpu().numpy() for array in (parent, subtree_end, length, positions)))
    rows = own_rows[:nodes].cpu().numpy()
    node = np.flatnonzero(rows).astype(np.int32)
    queries = Queries(node, (tree.length - rows)[node], tree.length[node])
    counts[2] = queries.num_rows
    shape, gpu = HeadShape(*heads), GpuCost.of(cost)
    runs = _runs(tree, run[:nodes].cpu().numpy()) if paths else None
    window, chunk, first = seen
    tiles = Visible(window or None, chunk or None, first) if paths else ALL
    formats = [decompose_unchecked(StepTree(tree, queries), shape, gpu.sharing, paths=paths, runs=runs, tiles=tiles)]
    plan = make_gpu_plan(formats, tree.length, queries.num_rows, shape, num_sms, gpu)
    made = list(zip(work, plan.arrays(), strict=True))
    if all(len(array) <= len(target) for target, array in made):
        for target, array in made:
            target[: len(array)] = torch.from_numpy(array)


def _runs(tree: TreeSnapshot, of: Ints) -> Runs:
    """The runs that the nodes are part of.  Plans depend on positions and lengths of runs, and not on pages."""
    node, runs, nothing = np.flatnonzero(of >= 0), int(of.max(initial=-1)) + 1, np.zeros(0, np.int32)
    start, length = np.full(runs, np.iinfo(np.int32).max, np.int32), np.zeros(runs, np.int32)
    np.minimum.at(start, of[node], tree.start[node])
    np.add.at(length, of[node], tree.length[node])
    return Runs(of, start, length, nothing, nothing, nothing)


def _tree(parent: Ints, subtree_end: Ints, length: Ints, start: Ints) -> TreeSnapshot:
    """A tree of these nodes, all of whose visible tokens have KV.  Plans do not depend on pages."""
    nothing = np.zeros(len(parent) + 1, dtype=np.int32)
    return TreeSnapshot(
        version=0,
        page_size=1,
        parent=parent,
        subtree_end=subtree_end,
        start=start,
        length=length,
        computed=length,
        first_slot=nothing[1:],
        page_indptr=nothing,
        pages=nothing[:0],
        sequence_node=nothing[:0],
        sequence_id=np.zeros(0, dtype=np.int64),
    )
