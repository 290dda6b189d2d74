"""What decodes: shared levels, private suffixes; its tree, bytes, the least time of its attention, its step."""

from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from benchmarks.runner import Row
from benchmarks.shapes import Shape
from benchmarks.tree_attention.workloads import MATMUL_TFLOPS, PAGE, READ_TBPS
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CostModel
from prefixkit.attention.step import Step, build_step
from prefixkit.backends.cuda.planner import TREE_TENSORS, WORK_TENSORS, CudaPlanner
from prefixkit.tree.snapshot import TreeSnapshot
from tests.named_trees import tree

# By this cost nothing is worth sharing.
NEVER = CostModel(item=1e30, kv_byte=0.0, partial_byte=0.0)


@dataclass(frozen=True)
class Case:
    """``batch`` sequences below shared levels, each with ``private`` tokens of its own, that sample ``new`` more.

    ``levels`` are ``(nodes, tokens of each)`` from the root down; a level's nodes have equally many below them.
    """

    levels: tuple[tuple[int, int], ...]
    batch: int
    new: int
    private: int = 0

    def __post_init__(self) -> None:
        if any(below % above for above, below in pairwise(self.counts)):
            raise ValueError(f"each level must have a multiple of the nodes above it, got {self.counts}")

    @property
    def counts(self) -> list[int]:
        """Nodes of each level, and sequences."""
        return [nodes for nodes, _ in self.levels] + [self.batch]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """New tokens at which a step is measured: at the beginning, half way, at the end."""
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

    def floor_ms(self, shape: Shape, new: int) -> float:
        """Least time of all layers' attention: bytes (KV once, queries, output) over bandwidth, or flops over rate."""
        own, shared = self.private + new, sum(tokens for _, tokens in self.levels)
        tokens = sum(nodes * count for nodes, count in self.levels) + self.batch * own
        moved = tokens * shape.bytes_per_token + 4 * shape.layers * shape.heads * shape.head_dim * self.batch
        flops = 4.0 * shape.layers * shape.heads * shape.head_dim * self.batch * (shared + own)
        return max(moved / READ_TBPS / 1e9, flops / MATMUL_TFLOPS / 1e9)

    def row(self, kind: str, shape: Shape) -> Row:
        """The beginning of a row of results."""
        floors = {new: self.floor_ms(shape, new) for new in self.lengths}
        at = {str(new): round(ms, 4) for new, ms in floors.items()}
        return {"kind": kind, "case": asdict(self), "floor_ms": round(mean(floors), 4), "floors_ms": at}


def two_level(batch: int, prefix: int, new: int, private: int = 0) -> Case:
    """All share one prefix."""
    return Case(((1, prefix),), batch, new, private)


def mean(at: dict[int, float]) -> float:
    """Mean over a generation, of values at its beginning, half and end between which they grow evenly."""
    first, middle, last = at.values()
    return (first + 2 * middle + last) / 4


def case_tree(case: Case) -> tuple[TreeSnapshot, list[np.ndarray]]:
    """A case's tree with leaves as long as they get; for each level, then for the leaves, their nodes in order."""
    counts, tokens = case.counts, [count for _, count in case.levels] + [case.private + case.new]
    parent, length, nodes = [], [], [[] for _ in counts]

    def grow(level: int, above: int, count: int) -> None:
        for _ in range(count):
            node = len(parent)
            nodes[level].append(node)
            parent.append(above)
            length.append(tokens[level])
            if level + 1 < len(counts):
                grow(level + 1, node, counts[level + 1] // counts[level])

    grow(0, -1, counts[0])
    return tree(parent, length), [np.array(found, np.int32) for found in nodes]


class TreeState:
    """The step of a case at any number of new tokens, in tensors that stay: so one captured graph serves all lengths.

    ``snapshot`` and ``nodes`` are those of :func:`case_tree`, ``step`` is at the length of the last :meth:`at`.
    """

    def __init__(self, case: Case, planner: Planner, device: torch.device, share: bool = True) -> None:
        self.case, self.planner, self._device = case, planner, device
        self.snapshot, self.nodes = case_tree(case)
        if not share:
            planner.cost = replace(NEVER, tile_heads=planner.cost.tile_heads)
        if isinstance(planner, CudaPlanner):
            planner.launch = None  # the host's plans fit into tensors of a size that is known before
            planner.gpu = replace(planner.gpu, sharing=planner.cost)
        self._plan: list[torch.Tensor] = []
        self.step = self._build(*self._grown(case.new))

    def at(self, new: int) -> None:
        """Let each sequence have so many new tokens; the last of them is the query of this step."""
        kept, now = self.step, self._build(*self._grown(new))
        kept.positions.copy_(now.positions)
        kept.slots.copy_(now.slots)
        stay = {name: getattr(kept, name) for name in ("tokens", "positions", "slots", "logit_rows")}
        self.step = replace(now, **stay)

    def _grown(self, new: int) -> tuple[TreeSnapshot, Queries]:
        full, leaf = self.snapshot, self.nodes[-1]
        length = full.length.copy()
        length[leaf] = self.case.private + new
        computed = length.copy()
        computed[leaf] -= 1
        # Another version for each length: plans are made anew.
        snapshot = replace(full, version=new, length=length, computed=computed)
        return snapshot, Queries(leaf, length[leaf] - 1, length[leaf])

    def _build(self, snapshot: TreeSnapshot, queries: Queries) -> Step:
        rows, planner = np.arange(self.case.batch, dtype=np.int64), self.planner
        of = StepTree(snapshot, queries)
        step = build_step(of, rows % 251, rows, planner, self._device)
        if not isinstance(planner, CudaPlanner):
            return step
        made = step.plan[: WORK_TENSORS + TREE_TENSORS]
        if not self._plan:
            capacity = planner.capacity_for(of)
            work = [torch.zeros(size, dtype=torch.int32, device=self._device) for size in capacity.shapes()]
            self._plan = work + [array.clone() for array in made[WORK_TENSORS:]]
        for there, array in zip(self._plan, made, strict=True):
            there[: len(array)].copy_(array)
        work, nodes = self._plan[:WORK_TENSORS], self._plan[WORK_TENSORS:]
        return replace(step, planned=planner.step_plan(work, nodes, of))
