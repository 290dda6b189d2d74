"""What the tree tests share: views of a tree that can be compared, and a pool whose every slot remembers its write."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree import Node, PrefixTree, Sequence, freeze
from prefixkit.tree.snapshot import TreeSnapshot


def path(node: Node) -> tuple[int, ...]:
    """The tokens from the root to the node's end."""
    tokens: list[int] = []
    above: Node | None = node
    while above is not None:
        tokens[:0] = above.tokens.tolist()
        above = above.parent
    return tuple(tokens)


def structure(tree: PrefixTree) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Each node as (path to its end, own tokens, sequences that end there), sorted: a tree without its history."""
    return sorted((path(node), tuple(node.tokens.tolist()), len(node.sequences)) for node in tree.nodes())


def fingerprint(tree: PrefixTree) -> Any:
    """Everything there is to know about a tree, without calling anything that caches."""
    nodes = [tree.root]
    for node in nodes:
        nodes.extend(node.children)
    return (
        tree.version,
        tree.sequences_version,
        tree.allocator.free,
        tree.allocator.refcounts.tobytes(),
        [
            (
                (node.id, node.parent.id if node.parent else None, [child.id for child in node.children]),
                (node.start, node.length, node.computed, node.first_slot, node.reserved),
                [other.id if other else None for other in (node.next_in_page, node.previous_in_page)],
                (node.tokens.tobytes(), node.pages.tobytes(), node.cached),
                {id: sequence.node.id for id, sequence in node.sequences.items()},
            )
            for node in nodes
        ],
    )


def assert_snapshot_is_fresh(tree: PrefixTree) -> None:
    """What the cached and refreshed snapshot says is what a rebuilt one says."""
    cached = tree.snapshot()
    nodes = [tree.root]
    for node in nodes:
        nodes.extend(node.children)
    all_of = {id: sequence for node in nodes for id, sequence in node.sequences.items()}
    running = {id: all_of[id] for id in sorted(cached.sequence_id.tolist())}
    whole = len(running) == len(all_of) and not any(node.cached for node in nodes)
    live = None if whole else freeze.live_children(running.values())
    rebuilt = freeze.rebuild(tree, live).snapshot
    for name in TreeSnapshot.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(cached, name), getattr(rebuilt, name), err_msg=name)


def uncomputed(tree: PrefixTree) -> list[tuple[Node, int, int]]:
    """``(node, computed, length)`` of the nodes that have tokens without KV, depth first: ancestors come first."""
    return [(node, node.computed, node.length) for node in tree.nodes() if node.computed < node.length]


class RememberingPool:
    """Stands for the KV pool: a token's "KV" is a hash of its whole path, written once, when it is computed."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.slots = np.full(tree.allocator.num_pages * tree.page_size, -1, np.int64)

    def compute(self, budget: int | None = None) -> None:
        """Write up to ``budget`` uncomputed tokens, ancestors first, as a step of the engine does."""
        nodes, counts = [], []
        for node, computed, length in uncomputed(self.tree):
            end = length if budget is None else min(length, computed + budget)
            if budget is not None:
                budget -= end - computed
            index = np.full(end - computed, node.index)
            self.slots[self.tree.snapshot().slots(index, np.arange(computed, end))] = hashes(path(node))[
                node.start + computed : node.start + end
            ]
            nodes.append(node)
            counts.append(end)
            if budget == 0:
                break
        self.tree.mark_computed(nodes, counts)

    def assert_keeps(self, tokens: list[int]) -> int:
        """What the tree finds of the tokens has KV of precisely these; returns how many that are."""
        found = self.tree.match(tokens)
        node: Node | None = found.node
        length = 0
        while node is not None and node.parent is not None:
            slots = node.slots[: node.computed]
            end = min(found.length, node.start + len(slots))
            np.testing.assert_array_equal(
                self.slots[slots][: end - node.start], hashes(tuple(tokens[:end]))[node.start :]
            )
            length = max(length, end if node.computed else 0)
            node = node.parent
        return length

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """What ``PrefixTree.compact`` asks for."""
        self.slots[target] = self.slots[source]

    def assert_holds(self, sequence_id: int, tokens: list[int]) -> None:
        """The sequence, read through the snapshot, gives back the KV of precisely its own tokens, in order."""
        snapshot = self.tree.snapshot()
        node = int(snapshot.sequence_node[snapshot.sequence_id == sequence_id].item())
        read: list[NDArray[np.int64]] = []
        length = 0
        while node >= 0:
            computed = int(snapshot.computed[node])
            complete = computed == snapshot.length[node]
            assert complete or not read, "an ancestor of computed tokens is not computed"
            if computed:
                read.insert(0, self.slots[snapshot.slots(np.full(computed, node), np.arange(computed))])
            length += int(snapshot.length[node])
            node = int(snapshot.parent[node])
        assert length == len(tokens)
        if read:
            found = np.concatenate(read)
            np.testing.assert_array_equal(found, hashes(tuple(tokens))[: len(found)])


def hashes(tokens: tuple[int, ...]) -> NDArray[np.int64]:
    """``[len(tokens)]`` a hash of each prefix."""
    value, result = 0, []
    for token in tokens:
        value = hash((value, token))
        result.append(value)
    return np.array(result, np.int64)


def tokens_of(tree: PrefixTree) -> list[tuple[list[int], list[int], int]]:
    """Nodes depth first as (tokens, pages, first_slot)."""
    return [(node.tokens.tolist(), node.pages.tolist(), node.first_slot) for node in tree.nodes()]


def structure_of(sequence: Sequence) -> list[int]:
    """Lengths of the nodes from a sequence's end to the root."""
    lengths, node = [], sequence.node
    while node.parent is not None:
        lengths.append(node.length)
        node = node.parent
    return lengths
