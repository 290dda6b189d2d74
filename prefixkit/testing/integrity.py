"""A check of a tree's bookkeeping, which recounts everything from the nodes, and trusts no stored count."""

from __future__ import annotations

from itertools import pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree import Node, PrefixTree, Sequence


def check_tree(tree: PrefixTree) -> None:
    """Raise AssertionError if an invariant does not hold; changes nothing."""
    nodes = _reachable(tree.root)
    for node in nodes:
        _check_links(node)
        _check_sequences(node, tree)
        if node is tree.root:
            _require(
                node.parent is None and node.start == node.length == node.num_pages == 0, "the root is empty", node
            )
        else:
            _check_node(node, tree.page_size)
    _require(len({node.id for node in nodes}) == len(nodes), "node ids are unique", nodes)
    _require(sum(node.reserved for node in nodes) == tree.reserved, "reserved pages are counted", tree.reserved)
    _require(sum(node.cached for node in nodes) == tree.num_cached, "cached nodes are counted", tree.num_cached)
    _check_pages(nodes, tree)
    _check_slots(nodes, tree.page_size)
    _check_states(nodes, 0 if tree.states is None else tree.states.count)


def _require(condition: bool, invariant: str, what: object) -> None:
    if not condition:
        raise AssertionError(f"broken invariant: {invariant}: {what}")


def _reachable(root: Node) -> list[Node]:
    nodes = [root]
    for node in nodes:  # the list grows while it is read: breadth first, without recursion
        nodes.extend(node.children)
    return nodes


def _check_links(node: Node) -> None:
    for key, group in node.branches.items():
        _require(len(group) > 0, "no branch is empty", node)
        for child in group:
            _require(child.parent is node, "a child knows its parent", child)
            _require(child.start >= node.start + node.length, "a child starts where its parent ends, or later", child)
            named = int(child.tokens[0]) if child.start == node.start + node.length else -1
            _require(named == key, "a branch is named after its first token, or is none that is found", child)
            _require(key >= 0 or not child.cached, "what is cached is a whole prefix", child)


def _check_sequences(node: Node, tree: PrefixTree) -> None:
    for id, sequence in node.sequences.items():
        _require(isinstance(sequence, Sequence) and sequence.id == id, "sequences are filed by id", sequence)
        _require(sequence.node is node and sequence.tree is tree, "a sequence knows where it ends", sequence)


def _check_node(node: Node, page_size: int) -> None:
    parent = node.parent
    assert parent is not None
    _require(node.length > 0, "a node holds tokens", node)
    _require(0 <= node.first_slot < page_size, "a node begins in its first page", node)
    _require(
        len(node.tokens) == node.length and len(node.page_buffer) >= node.num_pages, "arrays match the length", node
    )
    _require(node.reserved == 0 or not node.branches, "only leaves have reserved pages", node)
    _require(0 <= node.computed <= node.length, "0 <= computed <= length", node)
    if node.previous_in_page is parent:
        _require(node.first_slot >= parent.end_slot % page_size, "a node in its parent's last page lies after it", node)
    _require(node.computed == 0 or parent.computed == parent.length, "computed tokens have computed ancestors", node)
    _require(node.needed, "a node leads to a sequence, or is cached", node)
    _require(not node.cached or node.computed == node.length, "what is cached has KV", node)
    if not node.sequences and not node.cached and len(node.children) == 1:
        _require(not node.children[0].can_absorb(node), "an only child that can absorb its parent is merged", node)


def _check_pages(nodes: list[Node], tree: PrefixTree) -> None:
    held = np.concatenate([node.pages for node in nodes])
    refcounts = np.bincount(held, minlength=tree.allocator.num_pages)
    _require(np.array_equal(refcounts, tree.allocator.refcounts), "every page counts its holders", refcounts)
    free = int((refcounts == 0).sum())
    _require(free == tree.allocator.free, "free pages and held pages are all pages", (free, tree.allocator.free))


def _check_slots(nodes: list[Node], page_size: int) -> None:
    """No slot has two owners, and nodes know which nodes hold the adjacent slots before and after them, if any."""
    taken = np.concatenate([_slots(node, page_size) for node in nodes])
    taken.sort()
    twice = taken[1:][taken[1:] == taken[:-1]]
    _require(len(twice) == 0, "a slot has one owner", twice)
    holders: dict[int, list[tuple[int, Node]]] = {}
    for node in nodes:
        for i, page in enumerate(node.pages[: node.num_pages].tolist()):
            holders.setdefault(page, []).append((0 if i else node.first_slot, node))
    links = [
        pair for held in holders.values() for pair in pairwise(node for _, node in sorted(held, key=itemgetter(0)))
    ]
    for before, after in links:
        linked = before.next_in_page is after and after.previous_in_page is before
        _require(linked, "nodes that share a page are linked in the order of their slots", (before, after))
    ends = [end for node in nodes for end in (node.next_in_page, node.previous_in_page) if end is not None]
    _require(len(ends) == 2 * len(links), "nodes that share no page are not linked", ends)


def _slots(node: Node, page_size: int) -> NDArray[np.int64]:
    strip = node.pages.astype(np.int64)[:, None] * page_size + np.arange(page_size)
    return strip.reshape(-1)[node.first_slot : node.end_slot]


def _check_states(nodes: list[Node], count: int) -> None:
    """Each state has its own slot, and follows computed tokens."""
    slots = [node.state for node in nodes if node.state >= 0]
    for node in nodes:
        _require(node.state < 0 or node.computed > 0, "a state follows tokens that are computed", node)
        _require(node.computed not in node.checkpoints, "the state after all computed tokens is no checkpoint", node)
        _require(all(0 < at <= node.length for at in node.checkpoints), "checkpoints are within their node", node)
        there = {at: slot for at, slot in node.checkpoints.items() if slot >= 0}
        _require(all(at < node.computed for at in there), "checkpoints follow tokens that are computed", node)
        slots += there.values()
    _require(len(set(slots)) == len(slots), "each state has a slot of its own", slots)
    _require(all(1 <= slot <= count for slot in slots), "states are in slots that there are", slots)
