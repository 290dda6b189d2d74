"""The tree of captured decode steps: static buffers on a device, in which leaves grow."""

from __future__ import annotations

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


class BatchTooLarge(ValueError):
    """A batch does not fit the static buffers."""


class DecodeCapacity(NamedTuple):
    """Most rows, nodes and pages of all nodes of a batch's tree; the runs of a deep tree count as nodes."""

    rows: int
    nodes: int
    pages: int

    @staticmethod
    def of(tree: StepTree) -> DecodeCapacity:
        """The capacity that a decode step needs."""
        nodes, pages = tree.snapshot.num_nodes, len(tree.snapshot.pages)
        if tree.runs is not None:
            nodes, pages = nodes + len(tree.runs), pages + len(tree.runs.pages)
        return DecodeCapacity(len(tree.queries.node), nodes, pages)

    def holds(self, need: DecodeCapacity) -> bool:
        return all(map(ge, self, need))


class DecodeTree:
    """The tree of decode steps on the model's device: each query is the last token of a leaf.

    :meth:`upload` uploads a tree.  Each :meth:`advance` starts a step: it moves every row to the next position, and
    lengthens its leaf by a token.  Rows beyond those of the batch write nothing.

    Attributes:
        capacity: The capacity for batches.
        nodes: start, length, page_indptr, pages, first_slot, as ``tree_attention`` takes them; in a deep tree its runs
            follow its nodes.
        leaf: ``[rows]`` int32, the leaf of each row; -1 beyond the rows of the batch.
        sampled: ``[rows]`` int64 the tokens that the next step runs, written by the sampler; may be the sampler's
            tensor.
        tokens, positions, slots: ``[rows]`` int64, of the present step; token 0 in rows that run no token.
    """

    def __init__(self, capacity: DecodeCapacity, page_size: int, device: torch.device | str) -> None:
        self.capacity, self.page_size = capacity, page_size
        target = torch.device(device)
        rows, nodes, pages = (max(1, n) for n in (capacity.rows, capacity.nodes, capacity.pages))
        self._staged = Staged([(nodes,), (nodes,), (nodes + 1,), (pages,), (nodes,), (rows,)], target)
        *self.nodes, self.leaf = self._staged.tensors
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

    def enqueue_copy(self) -> None:
        """Copy the staging buffer that :meth:`stage` wrote last to the device.  Can be captured."""
        self._staged.enqueue_copy()

    def stage(self, step: StepTree) -> None:
        """The host's part of :meth:`upload`."""
        need = DecodeCapacity.of(step)
        if not self.capacity.holds(need):
            raise BatchTooLarge(f"a batch of {need} does not fit {self.capacity}; make a DecodeTree as large as that")
        tree, leaves, nodes = step.snapshot, step.queries.node, need.nodes
        before = tree.computed.copy()  # tokens with KV before the step
        before[leaves] = step.queries.begin
        *arrays, leaf = self._staged.writable()
        of_tree = tree.start, before, tree.page_indptr, tree.pages, tree.first_slot
        for staged, array in zip(arrays, with_runs(of_tree, step.runs), strict=True):
            staged[: len(array)] = array
        arrays[2][nodes + 1 :] = arrays[2][nodes]
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
