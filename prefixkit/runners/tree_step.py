"""Launching one step over a tree: the one way in which all tokens are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixkit.runners.batch import Batch, Runner
from prefixkit.tree.node import Node
from prefixkit.tree.radix import PrefixTree


def launch_step(runner: Runner, tree: PrefixTree, batch: Batch, nodes: Sequence[Node]) -> None:
    """Launch a batch over a tree, and mark its tokens computed.

    Args:
        runner: Runs it.
        tree: The tree that ``batch.tree`` is a snapshot of.
        batch: The step.
        nodes: The nodes of its query runs, in order.
    """
    runner.launch(batch)
    queries, snapshot = batch.tree.queries, batch.tree.snapshot
    tree.mark_computed(nodes, np.maximum(queries.end, snapshot.computed[queries.node]))  # some ran once more
