"""Regular trees by name, in depth-first order, and the queries of a step over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.queries import Queries
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence
from prefixkit.tree.snapshot import TreeSnapshot

PAGE = 16


def tree(parent: list[int], length: list[int]) -> TreeSnapshot:
    """A tree in depth-first order, every node on pages of its own, in order."""
    nodes = len(parent)
    start, size = np.zeros(nodes, np.int32), np.ones(nodes, np.int32)
    for node, above in enumerate(parent):
        start[node] = start[above] + length[above] if above >= 0 else 0
    for node in range(nodes - 1, 0, -1):
        if parent[node] >= 0:
            size[parent[node]] += size[node]
    tokens = np.array(length, np.int32)
    indptr = np.concatenate(([0], np.cumsum(-(-tokens // PAGE)))).astype(np.int32)
    return TreeSnapshot(
        version=1,
        page_size=PAGE,
        parent=np.array(parent, np.int32),
        subtree_end=(np.arange(nodes) + size).astype(np.int32),
        start=start,
        length=tokens,
        computed=tokens.copy(),
        first_slot=np.zeros(nodes, np.int32),
        page_indptr=indptr,
        pages=np.arange(indptr[-1], dtype=np.int32),
        sequence_node=np.zeros(0, np.int32),
        sequence_id=np.zeros(0, np.int64),
    )


def tree_of(name: str) -> TreeSnapshot:
    """The tree with a name.

    ``2L bB pP sS``: B sequences share P tokens and have S each.  ``3L bB pP mM kK sS``: B problems of M tokens share P,
    and K samples of each have S.  ``3L fewshot``: 2,400 tokens, 8 problems of 400, 128 samples of 256 each.  ``beam
    d6``: 2,048 tokens, then 64-token nodes that fork in two six times.  ``chain dD bB pP tT``: B chains of D nodes of
    T tokens below P shared ones.  ``comb dD bB tT sS``: a spine of D nodes of T tokens, B leaves of S at each.

    The pages of the other trees are laid out by a :class:`PrefixTree` that grows by these nodes.  S and T may be ranges
    such as ``1-400``; the lengths drawn are the same each time.  ``spine pP dD tT sS``: P tokens, then D nodes of T, a
    leaf of S at each.  ``search pP nN tT``: P tokens, then N nodes of T, each below any of those before.  ``turns bB pP
    kK dD tT``: B tasks of P tokens, K samples of each, of D turns of T.  ``beams bB pP nN``: P tokens, then the
    ancestors of B beams after N steps, where each beam continues a random one of the step before.
    """
    kind, *rest = name.split()
    if kind in ("spine", "search", "turns", "beams"):
        return grown(kind, {part[0]: part[1:] for part in rest})
    size = {part[0]: int(part[1:]) for part in rest if part[1:].isdigit()}
    if kind == "2L":
        return regular([(1, size["p"]), (size["b"], size["s"])])
    if kind == "beam":
        return binary(size["d"], prefix=2048, branch=64)
    if kind == "3L" and size:
        return regular([(1, size["p"]), (size["b"], size["m"]), (size["b"] * size["k"], size["s"])])
    if name == "3L fewshot":
        return regular([(1, 2400), (8, 400), (8 * 128, 256)])
    parent, length, above = [], [], -1
    if kind == "chain":
        parent, length = [-1], [size["p"]]
        for _ in range(size["b"]):
            first = len(parent)
            parent += [0, *range(first, first + size["d"] - 1)]
            length += [size["t"]] * size["d"]
    elif kind == "comb":
        for _ in range(size["d"]):
            spine = len(parent)
            parent += [above, *[spine] * size["b"]]
            length += [size["t"], *[size["s"]] * size["b"]]
            above = spine
    else:
        raise ValueError(f"no tree is named {name!r}; see tree_of for the names")
    return tree(parent, length)


def grown(kind: str, size: dict[str, str]) -> TreeSnapshot:
    """A tree of :func:`tree_of` whose pages a prefix tree lays out."""
    rng = np.random.default_rng(0)

    def drawn(letter: str) -> int:
        low, _, high = size[letter].partition("-")
        return int(rng.integers(int(low), int(high or low) + 1))

    nodes: list[tuple[int, int]] = []  # (parent, number of tokens)
    if kind == "turns":
        for _ in range(int(size["b"])):
            task = len(nodes)
            nodes.append((-1, drawn("p")))
            for _ in range(int(size["k"])):
                first = len(nodes)
                nodes += [(task, drawn("t")), *((first + turn, drawn("t")) for turn in range(int(size["d"]) - 1))]
        return laid_out(nodes)
    nodes.append((-1, drawn("p")))
    if kind == "beams":
        beams = int(size["b"])
        return laid_out([*nodes, *lineages(rng.integers(beams, size=(int(size["n"]) - 1, beams)))])
    if kind == "search":
        nodes += [(int(rng.integers(node + 1)), drawn("t")) for node in range(int(size["n"]))]
        return laid_out(nodes)
    above = 0
    for level in range(int(size["d"])):
        nodes.append((above, drawn("t")))
        before, above = above, len(nodes) - 1
        if level:  # the spine grows before the leaf, and takes the free slots
            nodes.append((before, drawn("s")))
    return laid_out([*nodes, (above, drawn("s"))])


def lineages(parents: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The last beams' ancestors as nodes below node 0, one for each run without a fork: ``parents[step, beam]``."""
    # For each step, the last one first: the beams before it that have descendants, and which of them each continues.
    alive = [np.unique(parents[-1], return_inverse=True)]
    for step in parents[-2::-1]:
        alive.append(np.unique(step[alive[-1][0]], return_inverse=True))
    nodes: list[tuple[int, int]] = []
    ends = np.zeros(1, np.int64)  # the node in which each living beam of a step ends
    for _, above in [(None, np.zeros(len(alive[-1][0]), np.int64)), *reversed(alive)]:
        children = np.bincount(above, minlength=len(ends))
        now = np.empty(len(above), np.int64)
        for beam, parent in enumerate(above):
            node = int(ends[parent])
            if node and children[parent] == 1:
                nodes[node - 1] = (nodes[node - 1][0], nodes[node - 1][1] + 1)
            else:
                nodes.append((node, 1))
                node = len(nodes)
            now[beam] = node
        ends = now
    return nodes


def laid_out(nodes: list[tuple[int, int]]) -> TreeSnapshot:
    """A tree grown by nodes, each given as its parent (-1: none) and its number of tokens; all tokens have KV.

    A sequence ends at each node, so that no nodes are merged.  Pages are numbered without gaps.
    """
    tree = PrefixTree(sum(-(-tokens // PAGE) for _, tokens in nodes), PAGE)
    ends: list[Sequence] = []
    for number, (above, tokens) in enumerate(nodes):
        content = np.full(tokens, number, np.int32)
        if above < 0:
            ends.append(tree.insert(content))
            continue
        ends += tree.fork(ends[above])
        tree.extend(ends[-1], content)
    snapshot = tree.snapshot()
    pages = np.unique(snapshot.pages, return_inverse=True)[1].astype(np.int32)
    return replace(snapshot, pages=pages, computed=snapshot.length.copy())


def regular(levels: Iterable[tuple[int, int]]) -> TreeSnapshot:
    """Levels of ``(nodes, tokens of each)`` from the roots down; nodes of one level have equally many children."""
    nodes, tokens = zip(*levels, strict=True)
    if any(below % above for above, below in pairwise(nodes)):
        raise ValueError(f"each level must have a multiple of the nodes above it, got {list(nodes)}")
    parent, length = [], []

    def grow(level: int, above: int, count: int) -> None:
        for _ in range(count):
            parent.append(above)
            length.append(tokens[level])
            if level + 1 < len(nodes):
                grow(level + 1, len(parent) - 1, nodes[level + 1] // nodes[level])

    grow(0, -1, nodes[0])
    return tree(parent, length)


def binary(levels: int, prefix: int, branch: int) -> TreeSnapshot:
    """``prefix`` tokens, then nodes of ``branch`` tokens that fork in two ``levels`` times."""
    parent, length = [-1], [prefix]

    def grow(above: int, left: int) -> None:
        for _ in range(2 if left else 0):
            parent.append(above)
            length.append(branch)
            grow(len(parent) - 1, left - 1)

    grow(0, levels)
    return tree(parent, length)


def leaf_queries(snapshot: TreeSnapshot) -> Queries:
    """A decode step: one query at the end of each leaf."""
    leaf = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1).astype(np.int32)
    return Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])


def prompts(
    tokens: int, chunk: int, count: int = 1, prefix: int = 0, prefix_computed: bool = True
) -> tuple[TreeSnapshot, Queries]:
    """A prefill step of ``count`` prompts of ``prefix + tokens``, for the last ``chunk`` tokens of each.

    Unless ``prefix_computed``, the shared prefix's tokens are queries of the step too.
    """
    own, leaves = ([tokens - chunk] * count, [tokens] * count), [tokens] * count
    snapshot = tree([-1] + [0] * count, [prefix, *leaves]) if prefix else tree([-1] * count, leaves)
    first, begin, end = (1, *own) if prefix else (0, *own)
    if prefix and not prefix_computed:
        first, begin, end = 0, [0, *begin], [prefix, *end]
    node = np.arange(first, first + len(begin), dtype=np.int32)
    queries = Queries(node, np.array(begin, np.int32), np.array(end, np.int32))
    snapshot.computed[queries.node] = queries.begin
    return snapshot, queries
