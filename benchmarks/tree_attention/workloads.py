"""Trees by name, and the least time that their attention can take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixkit.attention.bsr import Queries
from prefixkit.tree.snapshot import TreeSnapshot

HEAD_DIM, PAGE = 128, 16
HEADS = ((8, 1), (32, 8), (32, 32))
# What an H200 reads and multiplies; the anchors' floors are of these numbers too.
READ_TBPS, MATMUL_TFLOPS = 4.3, 790.0

TWO_LEVEL = [f"2L b{b} p{p} s{s}" for b in (64, 256, 1024) for p in (1024, 4096, 16384) for s in (16, 128, 512)]
DECODE = ["3L fewshot", "beam d6", *TWO_LEVEL]
# Query heads, KV heads, name.
SCALES = [
    (8, 1, "2L b8192 p4096 s128"),
    (8, 1, "2L b32768 p4096 s128"),
    (32, 8, "2L b8192 p4096 s128"),
    (32, 8, "2L b32768 p4096 s128"),
    (32, 32, "2L b8192 p4096 s128"),
    (32, 32, "2L b32768 p4096 s16"),
    (8, 1, "chain d64 b64 p2048 t32"),
    (32, 8, "chain d64 b256 p2048 t32"),
    (32, 32, "chain d64 b64 p2048 t32"),
    (32, 8, "comb d64 b8 t64 s128"),
    (8, 1, "2L b1 p1048576 s128"),
    (8, 1, "2L b64 p1048576 s128"),
    (32, 8, "2L b1 p1048576 s128"),
    (32, 8, "2L b64 p1048576 s128"),
    (32, 32, "2L b64 p1048576 s128"),
]


@dataclass(frozen=True, eq=False)
class Workload:
    """One decode step: a query at the end of each leaf."""

    name: str
    heads: int
    kv_heads: int
    snapshot: TreeSnapshot

    @property
    def leaf(self) -> np.ndarray:
        return np.flatnonzero(self.snapshot.subtree_end == np.arange(self.snapshot.num_nodes) + 1).astype(np.int32)

    @property
    def queries(self) -> Queries:
        length = self.snapshot.length[self.leaf]
        return Queries(self.leaf, length - 1, length)

    @property
    def kv_bytes(self) -> int:
        """Of K and V, each token once."""
        return 4 * HEAD_DIM * self.kv_heads * self.snapshot.num_tokens

    @property
    def tokens_seen(self) -> int:
        """By all queries together."""
        return int((self.snapshot.start[self.leaf] + self.snapshot.length[self.leaf]).astype(np.int64).sum())

    @property
    def floor_us(self) -> float:
        """The larger of bytes (K, V, queries and output, each once) over read bandwidth and flops over matmul rate."""
        moved = self.kv_bytes + 4 * HEAD_DIM * self.heads * len(self.leaf)
        flops = 4 * HEAD_DIM * self.heads * self.tokens_seen
        return max(moved / READ_TBPS / 1e6, flops / MATMUL_TFLOPS / 1e6)

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} {self.name}"


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
        ready=tokens.copy(),
        first_slot=np.zeros(nodes, np.int32),
        page_indptr=indptr,
        pages=np.arange(indptr[-1], dtype=np.int32),
        sequence_node=np.zeros(0, np.int32),
        sequence_id=np.zeros(0, np.int64),
    )


def workload(name: str, heads: int, kv_heads: int) -> Workload:
    """By name; see :func:`tree_of`."""
    return Workload(name, heads, kv_heads, tree_of(name))


def tree_of(name: str) -> TreeSnapshot:
    """The tree of a name.

    ``2L bB pP sS``: B sequences share P tokens and have S each.  ``3L fewshot``: 2,400 tokens, 8 problems of 400, 128 samples
    of 256 each.  ``beam d6``: 2,048 tokens, then 64-token nodes that branch in two six times.  ``chain dD bB pP tT``: B chains
    of D nodes of T tokens below P shared ones.  ``comb dD bB tT sS``: a spine of D nodes of T tokens, B leaves of S at each.
    """
    kind, *rest = name.split()
    size = {part[0]: int(part[1:]) for part in rest if part[1:].isdigit()}
    if name == "3L fewshot":
        parent, length = [-1], [2400]
        for _ in range(8):
            problem = len(parent)
            parent, length = [*parent, 0, *[problem] * 128], [*length, 400, *[256] * 128]
        return tree(parent, length)
    if kind == "beam":
        parent, length = [-1], [2048]
        _branch(parent, length, 0, size["d"])
        return tree(parent, length)
    if kind == "chain":
        parent, length = [-1], [size["p"]]
        for _ in range(size["b"]):
            first = len(parent)
            parent += [0, *range(first, first + size["d"] - 1)]
            length += [size["t"]] * size["d"]
        return tree(parent, length)
    if kind == "comb":
        parent, length, above = [], [], -1
        for _ in range(size["d"]):
            spine = len(parent)
            parent += [above, *[spine] * size["b"]]
            length += [size["t"], *[size["s"]] * size["b"]]
            above = spine
        return tree(parent, length)
    assert kind == "2L", name
    return tree([-1] + [0] * size["b"], [size["p"]] + [size["s"]] * size["b"])


def _branch(parent: list[int], length: list[int], above: int, levels: int) -> None:
    for _ in range(2 if levels else 0):
        parent.append(above)
        length.append(64)
        _branch(parent, length, len(parent) - 1, levels - 1)


@dataclass(frozen=True, eq=False)
class Level:
    """Nodes at one depth of a regular tree, chains counting as one node: alike in length and in how many queries are below.

    Attributes:
        pages: ``[nodes, tokens / page size]`` the pages of each.
        rows: Queries below each node.
    """

    pages: np.ndarray
    rows: int


def levels(snapshot: TreeSnapshot, page_order: np.ndarray) -> list[Level] | None:
    """The levels of a tree, root first; None where nodes of one depth differ, or cut pages.  ``page_order``: its page table."""
    if np.any(snapshot.length % snapshot.page_size):
        return None
    children = np.bincount(snapshot.parent[snapshot.parent >= 0], minlength=snapshot.num_nodes)
    is_leaf = children == 0
    leaves = np.concatenate(([0], np.cumsum(is_leaf)))
    below = leaves[snapshot.subtree_end] - leaves[:-1]
    found: list[Level] = []
    now = np.flatnonzero(snapshot.parent < 0)
    while len(now):
        parts = []
        while True:
            if len(set(snapshot.length[now])) > 1 or len(set(below[now])) > 1 or len(set(children[now])) > 1:
                return None
            first, count = snapshot.page_indptr[now], int(snapshot.length[now[0]]) // snapshot.page_size
            parts.append(page_order[first[:, None] + np.arange(count)])
            many = int(children[now[0]])
            if many != 1:
                break
            now = now + 1
        found.append(Level(np.concatenate(parts, axis=1), int(below[now[0]])))
        now = np.flatnonzero(np.isin(snapshot.parent, now))
    return found
