"""Workloads by name, and the least time that their attention can take."""

from dataclasses import dataclass

import numpy as np

from prefixkit.attention.queries import Queries
from prefixkit.testing.named_trees import PAGE, leaf_queries, tree_of
from prefixkit.tree.snapshot import TreeSnapshot

HEAD_DIM = 128
HEADS = ((8, 1), (32, 8), (32, 32))
READ_TBPS, MATMUL_TFLOPS = 4.3, 790.0  # rates of an H200, also used for the anchors' floors

TWO_LEVEL = [f"2L b{b} p{p} s{s}" for b in (64, 256, 1024) for p in (1024, 4096, 16384) for s in (16, 128, 512)]
DECODE = ["3L fewshot", "beam d6", *TWO_LEVEL]
WIDE, LONG = ["2L b8192 p4096 s128", "2L b32768 p4096 s128"], ["2L b1 p1048576 s128", "2L b64 p1048576 s128"]
SCALES_OF = {
    (8, 1): [*WIDE, "chain d64 b64 p2048 t32", *LONG],
    (32, 8): [*WIDE, "chain d64 b256 p2048 t32", "comb d64 b8 t64 s128", *LONG],
    (32, 32): [WIDE[0], "2L b32768 p4096 s16", "chain d64 b64 p2048 t32", LONG[1]],
}
# Trees of searches and conversations; each node lies in pages as the prefix tree lays it out.
DEEP = [
    (32, 8, name)
    for name in (
        "spine p2048 d1023 t1 s16",
        "spine p512 d256 t3 s1-400",
        "spine p512 d256 t1 s1-40",
        "search p700 n400 t5-60",
        "turns b16 p2048 k8 d4 t300",
    )
]
# GQA groups and head sizes other than the usual ones: a head size other than HEAD_DIM follows the tree's name.
FEW_SHOT = "3L b8 p1600 m160 k32 s128"
GROUPS = [
    (32, 2, FEW_SHOT),
    (96, 8, "2L b64 p4096 s128"),
    (128, 8, "2L b32 p8192 s256"),
    (28, 4, FEW_SHOT),
    *((*heads, f"{FEW_SHOT} x64") for heads in ((14, 2), (32, 8), (64, 8))),
    (16, 8, "2L b256 p1024 s64 x96"),
    (16, 8, f"{FEW_SHOT} x256"),
]
# Workloads whose time is that of reading own tokens, and one with a prefix that many share.
OWN = [(32, 8, "2L b32 p16 s16384"), (32, 8, "2L b64 p16 s32768 x64"), (32, 8, "2L b256 p16384 s64")]
SCALES = [(*heads, name) for heads, names in SCALES_OF.items() for name in names]


@dataclass(frozen=True, eq=False)
class Workload:
    """One decode step: a query at the end of each leaf."""

    name: str
    heads: int
    kv_heads: int
    snapshot: TreeSnapshot
    head_dim: int = HEAD_DIM

    @property
    def queries(self) -> Queries:
        return leaf_queries(self.snapshot)

    @property
    def leaf(self) -> np.ndarray:
        return self.queries.node

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each token once."""
        return 4 * self.head_dim * self.kv_heads * self.snapshot.num_tokens

    @property
    def tokens_seen(self) -> int:
        """The number of tokens that queries see, summed over all queries."""
        return int((self.snapshot.start[self.leaf] + self.snapshot.length[self.leaf]).astype(np.int64).sum())

    @property
    def floor_us(self) -> float:
        """The larger of bytes (K, V, queries and output, each once) over read bandwidth and flops over matmul rate."""
        moved = self.kv_bytes + 4 * self.head_dim * self.heads * len(self.leaf)
        flops = 4 * self.head_dim * self.heads * self.tokens_seen
        return max(moved / READ_TBPS / 1e6, flops / MATMUL_TFLOPS / 1e6)

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} {self.name}"


def workload(name: str, heads: int, kv_heads: int) -> Workload:
    """A workload by name: a tree of ``prefixkit/testing/named_trees.py``, then the head size if it is not HEAD_DIM."""
    tree, _, head_dim = name.partition(" x")
    return Workload(name, heads, kv_heads, tree_of(tree), int(head_dim or HEAD_DIM))


@dataclass(frozen=True, eq=False)
class Level:
    """Nodes at one depth of a regular tree, a chain as one: ``[nodes, tokens / page size]``, and queries below each."""

    pages: np.ndarray
    rows: int


def levels(snapshot: TreeSnapshot, page_order: np.ndarray) -> list[Level] | None:
    """The levels of a tree with this page table, root first; None where nodes of one depth differ or end in a page."""
    if np.any(snapshot.length % PAGE):
        return None
    children = np.bincount(snapshot.parent[snapshot.parent >= 0], minlength=snapshot.num_nodes)
    leaves = np.concatenate(([0], np.cumsum(children == 0)))
    below = leaves[snapshot.subtree_end] - leaves[:-1]
    found: list[Level] = []
    now = np.flatnonzero(snapshot.parent < 0)
    while len(now):
        parts = []
        while True:
            if any(len(set(of[now])) > 1 for of in (snapshot.length, below, children)):
                return None
            first, count = snapshot.page_indptr[now], int(snapshot.length[now[0]]) // PAGE
            parts.append(page_order[first[:, None] + np.arange(count)])
            if int(children[now[0]]) != 1:
                break
            now = now + 1
        found.append(Level(np.concatenate(parts, axis=1), int(below[now[0]])))
        now = np.flatnonzero(np.isin(snapshot.parent, now))
    return found
