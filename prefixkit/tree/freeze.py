"""From the linked tree to a `TreeSnapshot`: rebuilt when the structure has changed, else refreshed where it grew."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints, indptr_of
from prefixkit.tree.node import Node
from prefixkit.tree.sequence import Sequence
from prefixkit.tree.snapshot import TreeSnapshot


@dataclass(frozen=True, eq=False)
class Frozen:
    """A snapshot, its nodes in the same order, and the version of the sequences it shows."""

    snapshot: TreeSnapshot
    nodes: list[Node]
    sequences_version: int


def latest(
    frozen: Frozen | None,
    root: Node,
    page_size: int,
    versions: tuple[int, int],
    identity: object,
    partial: bool,
    included: Mapping[int, Sequence],
    touched: set[Node],
) -> Frozen:
    """The snapshot of a tree, brought up to date with the least work.

    Args:
        frozen: The one before; None where there is none.
        root, page_size: Of the tree.
        versions: Of the tree, and of its sequences.
        identity: Of the tree, for its snapshots.
        partial: Whether snapshots leave something out.
        included: The sequences that they hold, by id.
        touched: Nodes with another length or ``computed`` than the one before says; emptied.
    """
    if frozen is None or frozen.snapshot.version != versions[0]:
        live = None
        if partial:
            for node in () if frozen is None else frozen.nodes:
                node.index = -1
            live = live_children(included.values())
        frozen = rebuild(root, page_size, *versions, identity, live, included)
    else:
        frozen = refresh(frozen, [node for node in touched if node.index >= 0])
        if frozen.sequences_version != versions[1]:
            frozen = resequence(frozen, root, versions[1], included)
    touched.clear()
    return frozen


def live_children(sequences: Iterable[Sequence]) -> dict[Node, list[Node]]:
    """Of the nodes that lead to these sequences, the children that do: at their cost, whatever else the tree holds."""
    children: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for sequence in sequences:
        node = sequence.node
        while (above := node.parent) is not None and node not in seen:
            seen.add(node)
            children.setdefault(above, []).append(node)
            node = above
    return children


def rebuild(
    root: Node,
    page_size: int,
    version: int,
    sequences_version: int,
    tree: object,
    live: dict[Node, list[Node]] | None,
    included: Mapping[int, Sequence],
) -> Frozen:
    """Freeze the tree, whose identity is ``tree``; numbers the nodes (`Node.index`) in depth-first order.

    One loop, parents before children, over a stack: chains may be deep, and beams do this at every step.

    Args:
        live: The children of each node that are frozen, see :func:`live_children`; None: all are.
        included: The sequences that are, by id.
    """
    nodes: list[Node] = []
    parent: list[int] = []
    columns: list[int] = []  # start, length, computed, first slot, pages held, node after node: no tuple for each
    pages: list[Ints] = []
    stack = (root.children if live is None else live.get(root, []))[::-1]
    while stack:
        node = stack.pop()
        above, first, length = node.parent, node.first_slot, node.length
        assert above is not None, "only the root has none"
        node.index = len(nodes)
        nodes.append(node)
        parent.append(above.index)
        held = -(-(first + length) // page_size) + node.reserved
        columns += node.start, length, node.computed, first, held
        buffer = node.page_buffer
        pages.append(buffer if len(buffer) == held else buffer[:held])
        if live is not None:
            stack += live.get(node, [])[::-1]
            continue
        for group in reversed(node.branches.values()):
            stack += group if len(group) == 1 else group[::-1]
    start, lengths, computed, first_slot, num_pages = np.array(columns, np.int32).reshape(-1, 5).T.copy()
    sequence_node, sequence_id = _sequence_ends(root, nodes, included)
    snapshot = TreeSnapshot(
        version=version,
        page_size=page_size,
        parent=np.array(parent, np.int32),
        subtree_end=np.array(_subtree_ends(parent), np.int32),
        start=start,
        length=lengths,
        computed=computed,
        first_slot=first_slot,
        page_indptr=indptr_of(num_pages),
        pages=np.concatenate(pages) if pages else np.empty(0, np.int32),
        sequence_node=sequence_node,
        sequence_id=sequence_id,
        tree=tree,
    )
    return Frozen(snapshot, nodes, sequences_version)


def refresh(frozen: Frozen, touched: Collection[Node]) -> Frozen:
    """``frozen`` with the present ``length``, ``computed`` and pages of the nodes in ``touched``; the rest is shared.

    Between two versions nodes only grow (shortening is a change of version), so pages are only ever appended.
    """
    if not touched:
        return frozen
    old = frozen.snapshot
    index = np.array([node.index for node in touched])
    length, computed = old.length.copy(), old.computed.copy()
    length[index] = [node.length for node in touched]
    computed[index] = [node.computed for node in touched]

    page_indptr, pages = old.page_indptr, old.pages
    num_pages = np.diff(page_indptr)
    num_pages[index] = [node.num_pages + node.reserved for node in touched]
    grown = np.flatnonzero(num_pages > np.diff(page_indptr))
    if len(grown):
        page_indptr = indptr_of(num_pages)
        pages = _with_new_pages(old, frozen.nodes, grown, num_pages)
    snapshot = replace(old, length=length, computed=computed, page_indptr=page_indptr, pages=pages)
    return Frozen(snapshot, frozen.nodes, frozen.sequences_version)


def resequence(frozen: Frozen, root: Node, sequences_version: int, included: Mapping[int, Sequence]) -> Frozen:
    """``frozen`` with the sequences that end in its nodes now."""
    sequence_node, sequence_id = _sequence_ends(root, frozen.nodes, included)
    snapshot = replace(frozen.snapshot, sequence_node=sequence_node, sequence_id=sequence_id)
    return Frozen(snapshot, frozen.nodes, sequences_version)


def _subtree_ends(parent: list[int]) -> list[int]:
    ends = list(range(1, len(parent) + 1))
    for node in range(len(parent) - 1, -1, -1):
        above = parent[node]
        if above >= 0 and ends[above] < ends[node]:
            ends[above] = ends[node]
    return ends


def _sequence_ends(root: Node, nodes: list[Node], included: Mapping[int, Sequence]) -> tuple[Ints, NDArray[np.int64]]:
    """Where each of the sequences ends, and its id; empty ones end nowhere, which is -1, and come first."""
    ids = [id for id in root.sequences if id in included]
    indices = [-1] * len(ids)
    for node in nodes:
        if node.sequences:
            ends_here = [id for id in node.sequences if id in included]
            ids += ends_here
            indices += [node.index] * len(ends_here)
    return np.array(indices, np.int32), np.array(ids, np.int64)


def _with_new_pages(old: TreeSnapshot, nodes: list[Node], grown: NDArray[np.intp], num_pages: Ints) -> Ints:
    """``old.pages`` with the pages that the nodes ``grown`` (ascending) have gained put after those they had."""
    parts: list[Ints] = []
    begin = 0  # old.pages[:begin] are placed
    ends = old.page_indptr[grown + 1]
    had = ends - old.page_indptr[grown]
    for i, end, first, last in zip(grown.tolist(), ends.tolist(), had.tolist(), num_pages[grown].tolist(), strict=True):
        parts.append(old.pages[begin:end])
        parts.append(nodes[i].page_buffer[first:last])
        begin = end
    parts.append(old.pages[begin:])
    return np.concatenate(parts, out=_empty(int(num_pages.sum())))


def _empty(size: int) -> Ints:
    """Capacity for ``size`` entries, allocated in powers of two: the next step, a little longer, then gets the block
    that the last one gave back.  A fresh megabyte costs more in page faults than the copy into it.
    """
    return np.empty(1 << max(size - 1, 1).bit_length(), np.int32)[:size]
