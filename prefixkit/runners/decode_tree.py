"""The tree of captured steps: static buffers on a device; in those of decode steps leaves grow."""

from __future__ import annotations

from collections.abc import Sequence
from operator import ge
from typing import NamedTuple

import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401 - declares torch.ops.prefixkit
from prefixkit.attention.gpu.staging import Staged, carve, carved_size
from prefixkit.attention.paths.runs import with_runs
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step
from prefixkit.tree.arrays import Ints


class BatchTooLarge(ValueError):
    """A batch does not fit the static buffers."""


class TreeCapacity(NamedTuple):
    """Most query rows, nodes and pages of all nodes of a step's tree; the runs of a deep tree count as nodes."""

    rows: int
    nodes: int
    pages: int

    @staticmethod
    def of(tree: StepTree) -> TreeCapacity:
        """The capacity that a step needs."""
        nodes, pages = tree.snapshot.num_nodes, len(tree.snapshot.pages)
        if tree.runs is not None:
            nodes, pages = nodes + len(tree.runs), pages + len(tree.runs.pages)
        return TreeCapacity(tree.queries.num_rows, nodes, pages)

    def holds(self, need: TreeCapacity) -> bool:
        return all(map(ge, self, need))


class StagedTree:
    """The tree of a step in static buffers on a device, which one copy from the host's pinned memory fills.

    Args:
        capacity: The most rows, nodes and pages.
        device: The model's device.
        more: Shapes of further int32 buffers that the same copy fills.

    Attributes:
        capacity: As above.
        nodes: start, length, page_indptr, pages, first_slot, as ``tree_attention`` takes them; in a deep tree its runs
            follow its nodes.
    """

    def __init__(self, capacity: TreeCapacity, device: torch.device | str, more: Sequence[tuple[int, ...]]) -> None:
        self.capacity = capacity
        nodes, pages = max(1, capacity.nodes), max(1, capacity.pages)
        self._staged = Staged([(nodes,), (nodes,), (nodes + 1,), (pages,), (nodes,), *more], device)
        self.nodes = self._staged.tensors[:5]

    def enqueue_copy(self) -> None:
        """Copy the staging buffer that was written last to the device.  Can be captured."""
        self._staged.enqueue_copy()

    def _stage_nodes(self, step: StepTree, length: Ints) -> list[Ints]:
        """Stage the nodes, each with ``length`` tokens; returns the host's arrays of the further buffers.

        Raises:
            BatchTooLarge: the step does not fit; nothing has changed.
        """
        need = TreeCapacity.of(step)
        if not self.capacity.holds(need):
            raise BatchTooLarge(f"a batch of {need} does not fit {self.capacity}; make static buffers as large as that")
        tree, nodes = step.snapshot, need.nodes
        arrays = self._staged.writable()
        of_tree = tree.start, length, tree.page_indptr, tree.pages, tree.first_slot
        for staged, array in zip(arrays, with_runs(of_tree, step.runs), strict=False):
            staged[: len(array)] = array
        arrays[2][nodes + 1 :] = arrays[2][nodes]
        return arrays[5:]


class DecodeTree(StagedTree):
    """The tree of decode steps on the model's device: each query is the last token of a leaf.

    :meth:`upload` uploads a tree.  Each :meth:`advance` starts a step: it moves every row to the next position, and
    lengthens its leaf by a token.  Rows beyond those of the batch write nothing.

    Attributes:
        leaf: ``[rows]`` int32, the leaf of each row; -1 beyond the rows of the batch.
        sampled: ``[rows]`` int64 the tokens that the next step runs, written by the sampler; may be the sampler's
            tensor.
        tokens, positions, slots: ``[rows]`` int64, of the present step; token 0 in rows that run no token.
    """

    def __init__(self, capacity: TreeCapacity, page_size: int, device: torch.device | str) -> None:
        rows, target = max(1, capacity.rows), torch.device(device)
        super().__init__(capacity, target, [(rows,)])
        self.page_size = page_size
        (self.leaf,) = self._staged.tensors[5:]
        size, row = carved_size([(2 * rows,)] * 4), ((rows,), True)
        flat = torch.zeros(size, dtype=torch.int32, device=target)
        self.sampled, self.tokens, self.positions, self.slots = carve(flat, [row] * 4)
        self.slots.fill_(-1)
        self.leaf.fill_(-1)

    def upload(self, step: StepTree) -> None:
        """Upload a decode step by one copy on the current stream; the host does not wait.

        :meth:`advance` starts the step.

        Raises:
            BatchTooLarge: the step does not fit; nothing has changed.
        """
        self.stage(step)
        self._staged.upload()

    def stage(self, step: StepTree) -> None:
        """The host's part of :meth:`upload`."""
        leaves, before = step.queries.node, step.snapshot.computed.copy()  # tokens with KV before the step
        before[leaves] = step.queries.begin if step.full is None else step.queries.begin + step.full
        (leaf,) = self._stage_nodes(step, before)
        leaf[: len(leaves)], leaf[len(leaves) :] = leaves, -1

    def advance(self, rows: int) -> None:
        """Start the next step of the first ``rows`` rows, on the current stream.  Can be captured."""
        torch.ops.prefixkit.advance(
            self.leaf, *self.nodes, self.sampled, self.tokens, self.positions, self.slots, rows, self.page_size
        )

    def step(self, tree: StepTree, wanted: Tensor, plans: tuple[StepPlan, ...], counts: tuple[int, ...]) -> Step:
        """The step of the first rows, listed in ``wanted``, over these buffers, with the lengths of ``tree``."""
        rows = len(wanted)
        return Step(
            tokens=self.tokens[:rows],
            positions=self.positions[:rows],
            slots=self.slots[:rows],
            logit_rows=wanted,
            length=tree.length,
            plans=plans,
            layer_counts=counts,
        )
