"""Freeze the linked tree into a `TreeSnapshot`: rebuild it if the structure changed, else refresh nodes that grew."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints, Longs, indptr_of
from prefixkit.tree.changes.edits import TreeEdits
from prefixkit.tree.node import Node
from prefixkit.tree.sequence import Sequence
from prefixkit.tree.snapshot import TreeSnapshot


@dataclass(frozen=True, eq=False)
class Frozen:
    """A snapshot, the tree's nodes in its order, and the version of the sequences in it."""

    snapshot: TreeSnapshot
    nodes: list[Node]
    sequences_version: int


def latest(tree: TreeEdits, frozen: Frozen | None) -> Frozen:
    """The current snapshot of a tree, derived from the previous one with the least work."""
    if frozen is None or frozen.snapshot.version != tree.version:
        live = None
        if tree.partial:
            for node in () if frozen is None else frozen.nodes:
                node.index = -1
            live = live_children(tree.included.values())
        frozen = rebuild(tree, live)
    else:
        changes = _growth(frozen, [node for node in tree.touched if node.index >= 0])
        if frozen.sequences_version != tree.sequences_version:
            changes["sequence_node"], changes["sequence_id"] = _sequence_ends(tree, frozen.nodes)
        if changes:
            frozen = Frozen(replace(frozen.snapshot, **changes), frozen.nodes, tree.sequences_version)
    tree.touched.clear()
    return frozen


def live_children(sequences: Iterable[Sequence]) -> dict[Node, list[Node]]:
    """For each node on a path to one of these sequences, its children on such paths.  O(nodes on these paths)."""
    children: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for sequence in sequences:
        node = sequence.node
        while (above := node.parent) is not None and node not in seen:
            seen.add(node)
            children.setdefault(above, []).append(node)
            node = above
    return children


def rebuild(tree: TreeEdits, live: dict[Node, list[Node]] | None) -> Frozen:
    """Freeze a tree; numbers the nodes (`Node.index`) in the order of a snapshot, see :class:`TreeSnapshot`.

    One loop over a stack, parents before children: chains may be deep, and beam search rebuilds at every step.

    Args:
        tree: The tree.
        live: The children of each node that go into the snapshot, see :func:`live_children`; None: all of them.
    """
    page_size = tree.page_size
    nodes: list[Node] = []
    parent: list[int] = []
    stack = (tree.root.children if live is None else live.get(tree.root, []))[::-1]
    while stack:
        node = stack.pop()
        above = node.parent
        assert above is not None, "only the root has none"
        node.index = len(nodes)
        nodes.append(node)
        parent.append(above.index)
        if not node.branches:
            continue
        if live is not None:
            stack += live.get(node, [])[::-1]
            continue
        for group in reversed(node.branches.values()):
            stack += group if len(group) == 1 else group[::-1]
    ends, heavy = _subtrees(parent)
    parents, subtree_ends = (np.fromiter(own, np.int32, len(nodes)) for own in (parent, ends))
    order = heaviest_last(ends, heavy)
    if order is not None:
        nodes = [nodes[old] for old in order.tolist()]
        for index, node in enumerate(nodes):
            node.index = index
        place = np.arange(len(nodes), dtype=np.int32)
        subtree_ends = place + (subtree_ends - place)[order]
        place[order] = np.arange(len(nodes))
        parents = np.where(parents[order] >= 0, place[parents[order]], parents[order])
    column = partial(np.fromiter, dtype=np.int32, count=len(nodes))  # half the time of an array made of a list
    start, first_slot = column([node.start for node in nodes]), column([node.first_slot for node in nodes])
    lengths, computed = column([node.length for node in nodes]), column([node.computed for node in nodes])
    num_pages = -(-(first_slot + lengths) // page_size) + column([node.reserved for node in nodes])
    pages = [node.page_buffer[:held] for node, held in zip(nodes, num_pages.tolist(), strict=True)]
    sequence_node, sequence_id = _sequence_ends(tree, nodes)
    snapshot = TreeSnapshot(
        version=tree.version,
        page_size=page_size,
        parent=parents,
        subtree_end=subtree_ends,
        start=start,
        length=lengths,
        computed=computed,
        first_slot=first_slot,
        page_indptr=indptr_of(num_pages),
        pages=np.concatenate(pages) if pages else np.empty(0, np.int32),
        sequence_node=sequence_node,
        sequence_id=sequence_id,
        content=np.fromiter([node.content for node in nodes], np.int64, len(nodes)),
        tree=tree.identity,
    )
    return Frozen(snapshot, nodes, tree.sequences_version)


def heaviest_last(subtree_end: list[int], heavy: list[int]) -> Longs | None:
    """Depth-first order in which each node's child with the most leaves comes last, the other children in their order.
    None if the nodes are in this order already.

    Attention reads nodes of a path as one list (``attention/paths/heavy_paths.py``), and a path follows the last child.
    Most queries are in leaves, and leaves depend on the structure alone, so snapshots of one version have one order.

    Args:
        subtree_end, heavy: Of a tree in depth-first order; see :func:`_subtrees`.
    """
    change, moved = [0] * (len(heavy) + 1), False
    for above, child in enumerate(heavy):
        # A heavy child's subtree moves back by the nodes of the siblings after it, and these move forward by its nodes.
        if child >= 0 and (end := subtree_end[child]) < (parents_end := subtree_end[above]):
            change[child] += parents_end - end
            change[end] += child - parents_end
            change[parents_end] += end - child
            moved = True
    if not moved:
        return None
    nodes, order = np.arange(len(heavy)), np.empty(len(heavy), np.int64)
    order[nodes + np.cumsum(change)[:-1]] = nodes
    return order


def _growth(frozen: Frozen, touched: Collection[Node]) -> dict[str, Any]:
    """The snapshot fields that change with the current ``length``, ``computed`` and pages of the nodes in ``touched``.

    Within one version nodes only grow (shortening changes the version), so pages are only ever appended.
    """
    if not touched:
        return {}
    old = frozen.snapshot
    index = np.array([node.index for node in touched])
    length, computed = old.length.copy(), old.computed.copy()
    length[index] = [node.length for node in touched]
    computed[index] = [node.computed for node in touched]
    changes: dict[str, Any] = {"length": length, "computed": computed}
    num_pages = np.diff(old.page_indptr)
    num_pages[index] = [node.num_pages + node.reserved for node in touched]
    grown = np.flatnonzero(num_pages > np.diff(old.page_indptr))
    if len(grown):
        changes["page_indptr"] = indptr_of(num_pages)
        changes["pages"] = _with_new_pages(old, frozen.nodes, grown, num_pages)
    return changes


def _subtrees(parent: list[int]) -> tuple[list[int], list[int]]:
    """For each node one past the last node of its subtree, and its child with the most leaves: the last such child, or
    -1 in a leaf.
    """
    count = len(parent)
    ends, leaves, most, heavy = [*range(1, count + 1)], [0] * count, [0] * count, [-1] * count
    for node in range(count - 1, -1, -1):
        above, end = parent[node], ends[node]
        own = leaves[node] if end > node + 1 else 1
        if above < 0:
            continue
        if ends[above] < end:
            ends[above] = end
        leaves[above] += own
        if own > most[above]:  # later children come first
            most[above], heavy[above] = own, node
    return ends, heavy


def _sequence_ends(tree: TreeEdits, nodes: list[Node]) -> tuple[Ints, Longs]:
    """The node where each sequence ends, and its id; empty sequences come first and have node -1."""
    included = tree.included
    ids = [id for id in tree.root.sequences if id in included]
    indices = [-1] * len(ids)
    for index, node in enumerate(nodes):
        if node.sequences:
            own = [id for id in node.sequences if id in included]
            ids += own
            indices += [index] * len(own)
    return np.array(indices, np.int32), np.array(ids, np.int64)


def _with_new_pages(old: TreeSnapshot, nodes: list[Node], grown: NDArray[np.intp], num_pages: Ints) -> Ints:
    """``old.pages``, with the new pages of each node in ``grown`` (ascending) inserted after its old ones."""
    parts: list[Ints] = []
    begin = 0  # old.pages[:begin] are in parts
    ends = old.page_indptr[grown + 1]
    had = ends - old.page_indptr[grown]
    for i, end, first, last in zip(grown.tolist(), ends.tolist(), had.tolist(), num_pages[grown].tolist(), strict=True):
        parts.append(old.pages[begin:end])
        parts.append(nodes[i].page_buffer[first:last])
        begin = end
    parts.append(old.pages[begin:])
    # Sizes are powers of two: the slightly larger array of the next step then reuses the block that the allocator got
    # back.  A fresh megabyte costs more in page faults than the copy into it.
    size = int(num_pages.sum())
    return np.concatenate(parts, out=np.empty(1 << max(size - 1, 1).bit_length(), np.int32)[:size])
