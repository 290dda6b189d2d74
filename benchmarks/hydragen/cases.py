"""What decodes: shared levels, private suffixes; the tree of it, its bytes, the least time of its attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.hydragen.shapes import Shape
from benchmarks.tree_attention.workloads import MATMUL_TFLOPS, PAGE, READ_TBPS, tree
from prefixkit.tree.snapshot import TreeSnapshot


@dataclass(frozen=True)
class Case:
    """``batch`` sequences below shared levels, each with ``private`` tokens of its own, that draw ``new`` more.

    Attributes:
        levels: ``(nodes, tokens of each)`` from the root down; a level's nodes have equally many below them.
    """

    levels: tuple[tuple[int, int], ...]
    batch: int
    new: int
    private: int = 0

    def __post_init__(self) -> None:
        counts = [nodes for nodes, _ in self.levels] + [self.batch]
        if any(below % above for above, below in pairwise(counts)):
            raise ValueError(f"each level must have a multiple of the nodes above it, got {counts}")

    @property
    def shared(self) -> int:
        """Tokens that a sequence shares with others."""
        return sum(tokens for _, tokens in self.levels)

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Drawn tokens at which a step is measured: at the beginning, half way, at the end."""
        return 1, self.new // 2, self.new

    def own(self, levels: int) -> int:
        """Tokens that a sequence holds for itself at the end, where only so many levels are shared."""
        return sum(tokens for _, tokens in self.levels[levels:]) + self.private + self.new

    def tokens_held(self, levels: int | None) -> int:
        """KV tokens at the end, if so many levels are stored once; None: as a tree holds them, in whole pages."""
        if levels is None:
            shared = sum(nodes * -(-tokens // PAGE) * PAGE for nodes, tokens in self.levels)
            return shared + self.batch * -(-self.own(len(self.levels)) // PAGE) * PAGE
        return sum(nodes * tokens for nodes, tokens in self.levels[:levels]) + self.batch * self.own(levels)

    def floor_ms(self, shape: Shape, drawn: int) -> float:
        """Least time of all layers' attention: bytes (KV once, queries, output) over bandwidth, or flops over rate."""
        own = self.private + drawn
        tokens = sum(nodes * count for nodes, count in self.levels) + self.batch * own
        moved = tokens * shape.bytes_per_token + 4 * shape.layers * shape.heads * shape.head_dim * self.batch
        flops = 4.0 * shape.layers * shape.heads * shape.head_dim * self.batch * (self.shared + own)
        return max(moved / READ_TBPS / 1e9, flops / MATMUL_TFLOPS / 1e9)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def two_level(batch: int, prefix: int, new: int, private: int = 0) -> Case:
    """All share one prefix."""
    return Case(((1, prefix),), batch, new, private)


def mean(at: dict[int, float]) -> float:
    """Mean over a generation, of values at its beginning, half and end between which they grow evenly."""
    first, middle, last = at.values()
    return (first + 2 * middle + last) / 4


@dataclass(frozen=True, eq=False)
class CaseTree:
    """A case as a tree with every page it will need.

    Attributes:
        snapshot: Leaves as long as they get.
        nodes: For each level, then for the leaves, their nodes in order.
    """

    snapshot: TreeSnapshot
    nodes: list[np.ndarray]

    @staticmethod
    def of(case: Case) -> CaseTree:
        counts = [nodes for nodes, _ in case.levels] + [case.batch]
        tokens = [count for _, count in case.levels] + [case.private + case.new]
        parent: list[int] = []
        length: list[int] = []
        nodes: list[list[int]] = [[] for _ in counts]
        waiting = [(0, -1)] * counts[0]
        while waiting:
            level, above = waiting.pop()
            node = len(parent)
            nodes[level].append(node)
            parent.append(above)
            length.append(tokens[level])
            if level + 1 < len(counts):
                waiting += [(level + 1, node)] * (counts[level + 1] // counts[level])
        return CaseTree(tree(parent, length), [np.array(found, np.int32) for found in nodes])
