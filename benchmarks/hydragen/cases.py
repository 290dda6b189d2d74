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
from prefixkit.backends.cuda.device_planner import TREE_TENSORS, WORK_TENSORS, CudaPlanner
from prefixkit.testing.named_trees import tree
from prefixkit.tree.snapshot import TreeSnapshot


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
        """New tokens at which a step is measured."""
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
        at = {str(new): round(self.floor_ms(shape, new), 4) for new in self.lengths}
        return {"kind": kind, "case": asdict(self), "floor_ms": round(self.mean_floor_ms(shape), 4), "floors_ms": at}

    def mean_floor_ms(self, shape: Shape) -> float:
        return mean({new: self.floor_ms(shape, new) for new in self.lengths})


def two_level(batch: int, prefix: int, new: int, private: int = 0) -> Case:
    """All share one prefix."""
    return Case(((1, prefix),), batch, new, private)


def mean(at: dict[int, float]) -> float:
    """Mean over a generation, of values at its beginning, half and end between which they grow evenly."""
    first, middle, last = at.values()
    return (first + 2 * middle + last) / 4


def case_tree(case: Case) -> tuple[TreeSnapshot, list[np.ndarray]]:
    """A case's tree with leaves as long as they get; for each level, then for the leaves, their nodes in order."""
    tokens, parent, level_of = [count for _, count in case.levels] + [case.private + case.new], [], []
    below = [count // above for above, count in pairwise([1, *case.counts])]

    def grow(level: int, above: int) -> None:
        for _ in range(below[level] if level < len(below) else 0):
            parent.append(above)
            level_of.append(level)
            grow(level + 1, len(parent) - 1)

    grow(0, -1)
    nodes = [np.flatnonzero(np.array(level_of) == level).astype(np.int32) for level in range(len(below))]
    return tree(parent, [tokens[level] for level in level_of]), nodes


class TreeState:
    """The step of a case at any number of new tokens, in tensors that stay: one captured graph serves all lengths."""

    def __init__(self, case: Case, planner: Planner, device: torch.device, share: bool = True) -> None:
        self.case, self.planner, self._device = case, planner, device
        self.snapshot, self.nodes = case_tree(case)
        if not share:  # by this cost nothing is worth sharing
            planner.cost = CostModel(item=1e30, kv_byte=0.0, partial_byte=0.0, tile_heads=planner.cost.tile_heads)
        if isinstance(planner, CudaPlanner):
            planner.launch = None  # the host's plans fit into tensors of a size that is known before
            planner.gpu = replace(planner.gpu, sharing=planner.cost)
        self._plan: list[torch.Tensor] = []
        self.step = self._build(case.new)

    def at(self, new: int) -> None:
        """Let each sequence have so many new tokens; the last of them is the query of this step."""
        kept, now = self.step, self._build(new)
        kept.positions.copy_(now.positions)
        kept.slots.copy_(now.slots)
        stay = {name: getattr(kept, name) for name in ("tokens", "positions", "slots", "logit_rows")}
        self.step = replace(now, **stay)

    def _build(self, new: int) -> Step:
        leaf, length, planner = self.nodes[-1], self.snapshot.length.copy(), self.planner
        length[leaf] = self.case.private + new
        computed = length.copy()
        computed[leaf] -= 1
        snapshot = replace(self.snapshot, version=new, length=length, computed=computed)  # plans are made anew
        rows, of = np.arange(self.case.batch), StepTree(snapshot, Queries(leaf, computed[leaf], length[leaf]))
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
