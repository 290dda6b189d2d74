"""Plans made on the GPU: one launch that a CUDA graph can capture, from the tree's arrays to a plan's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.bsr import Queries, check_queries, visible_lengths
from prefixkit.attention.capacity import OVERFLOW, PlanCapacity, PlanTooLarge, capacity_for
from prefixkit.attention.gpu_cost import H200, GpuCost
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.staging import Staged, carve, room
from prefixkit.backends.cuda.layouts import PLAN_TREE
from prefixkit.backends.cuda.units import PLAN, PLAN_LARGE, PLAN_NODES
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.tree.snapshot import TreeSnapshot

_THREADS = 1024
# Ints of scratch: per node, tile and item; room to round up.
_PER_NODE, _PER_TILE, _PER_ITEM, _SPARE = 10, 6, 7, 256


@cache
def _function(large: bool, device: int) -> jit.Function:
    function = jit.load(PLAN, device)[PLAN.names[0]]
    if large or function.max_shared < 4 * _PER_NODE * (PLAN_NODES + 4):
        function = jit.load(PLAN_LARGE, device)[PLAN_LARGE.names[0]]
    PLAN_TREE.check(function)
    return function


def _scratch_ints(nodes: int, capacity: PlanCapacity) -> int:
    items = capacity.wide + capacity.narrow + 8
    return _PER_NODE * (nodes + 8) + (_PER_TILE + _PER_ITEM) * items + capacity.rows + _SPARE


def _arguments(
    shape: HeadShape,
    gpu: GpuCost,
    num_sms: int,
    nodes: int,
    capacity: PlanCapacity,
    addresses: Iterable[int],
    shared_bytes: int,
) -> tuple[int | float, ...]:
    """The kernel's parameter; ``addresses`` are of the tree's five arrays, the plan's six and the scratch."""
    sharing, many = gpu.sharing, max(1, gpu.sharing.tile_heads // shape.group)
    return (
        *addresses,
        sharing.kv_byte * shape.kv_bytes,
        sharing.item,
        sharing.wide_tile * shape.kv_heads,
        sharing.narrow_tile * shape.kv_heads,
        sharing.partial_byte * shape.partial_bytes,
        gpu.wide.tokens_per_us,
        gpu.narrow.tokens_per_us,
        -(-(2**32) // many),
        *(nodes, capacity.wide, capacity.narrow, capacity.segments, capacity.rows, capacity.partials),
        *(shape.group, shape.kv_heads, num_sms, many, shared_bytes // 4),
        *(n for role in (gpu.wide, gpu.narrow) for n in (role.unit, role.workers, *role.points(), role.least)),
    )


def plan_on_gpu(shape: HeadShape, gpu: GpuCost, num_sms: int, capacity: PlanCapacity, tree: Tensor) -> list[Tensor]:
    """Launch the planner on the current stream, for tensors of the plan's own; the host does not wait.

    Args:
        shape, gpu, num_sms: What to plan for; groups of at most the ``tile_heads`` of its cost.
        capacity: What the plan may hold.
        tree: ``[4 * nodes + 1]`` int32: parent, subtree_end, length, own, as :class:`CudaPlanner` has them; how many nodes.

    Returns:
        The plan as ``tree_attention`` takes it, once the launch has ended.
    """
    nodes, device = len(tree) // 4, tree.device
    function = _function(nodes > PLAN_NODES, device.index)
    shapes = capacity.shapes()
    flat = torch.empty(room(shapes), dtype=torch.int32, device=device)
    work = carve(flat, [(part, False) for part in shapes])
    # Given back on return: who takes it next comes later on this stream.
    scratch = torch.empty(_scratch_ints(nodes, capacity), dtype=torch.int32, device=device)
    parent = tree.data_ptr()
    trees = (parent + 4 * nodes * array for array in (4, 0, 1, 2, 3))
    plan = (tensor.data_ptr() for tensor in (*work, scratch))
    values = _arguments(shape, gpu, num_sms, nodes, capacity, (*trees, *plan), function.max_shared)
    say = f"plan_tree on {device}: {nodes} nodes, room for {capacity}".__str__
    launch(function, PLAN_TREE, values, (1, 1, 1), _THREADS, function.max_shared // 4 * 4, say)
    return work


class CudaPlanner:
    """Makes plans equal to ``make_gpu_plan``'s, on the GPU, into buffers whose addresses stay.

    :meth:`load` brings a tree, :meth:`plan` launches the planner.  A graph that captured :meth:`plan` plans anew at every
    replay, from what the tree's tensors hold then: loaded by the host before, or written by kernels.

    Attributes:
        capacity: What a plan may hold.
        nodes: How many nodes a tree may have.
        num_nodes: ``[1]`` nodes of the tree, on the device, as are the following.
        parent, subtree_end: ``[nodes]`` as in the snapshot.
        length: ``[nodes]`` tokens visible in the step; see ``visible_lengths``.
        own: ``[nodes]`` query rows in each node.
        work: The plan, as ``tree_attention`` takes it.
    """

    def __init__(
        self,
        shape: HeadShape,
        nodes: int,
        capacity: PlanCapacity,
        device: torch.device | str,
        gpu: GpuCost = H200,
        num_sms: int | None = None,
    ) -> None:
        self.shape, self.nodes, self.capacity, self.gpu = shape, nodes, capacity, gpu
        target = torch.device(device)
        self.num_sms = num_sms or torch.cuda.get_device_properties(target).multi_processor_count
        self._tree = Staged([(4,), *[(max(nodes, 1),)] * 4], target)
        sizes, self.parent, self.subtree_end, self.length, self.own = self._tree.tensors
        self.num_nodes = sizes[:1]
        self._plan = Staged(capacity.shapes(), target)
        self.work: list[Tensor] = self._plan.tensors
        self._scratch = torch.zeros(_scratch_ints(nodes, capacity), dtype=torch.int32, device=target)
        self._function = _function(nodes > PLAN_NODES, self._scratch.device.index)
        tensors = (self.num_nodes, self.parent, self.subtree_end, self.length, self.own, *self.work, self._scratch)
        addresses = (tensor.data_ptr() for tensor in tensors)
        self._values = _arguments(shape, gpu, self.num_sms, nodes, capacity, addresses, self._function.max_shared)

    def load(self, snapshot: TreeSnapshot, queries: Queries) -> None:
        """Bring a tree and its queries to the device: one copy on the current stream, for which the host does not wait.

        Raises:
            ValueError: the queries leave out KV that they need.
            PlanTooLarge: some plan of this tree might not fit; nothing has changed.
        """
        check_queries(snapshot, queries)
        self.check(snapshot, queries)
        count = snapshot.num_nodes
        sizes, parent, subtree_end, length, own = self._tree.begin()
        sizes[0] = count
        parent[:count], subtree_end[:count] = snapshot.parent, snapshot.subtree_end
        length[:count], own[:count] = visible_lengths(snapshot, queries), queries.rows_per_node(count)
        self._tree.send()

    def check(self, snapshot: TreeSnapshot, queries: Queries) -> None:
        """Raise PlanTooLarge unless every plan of this tree fits, whatever its nodes' lengths become."""
        if snapshot.num_nodes > self.nodes:
            raise PlanTooLarge(f"the tree has {snapshot.num_nodes} nodes, but the planner has room for {self.nodes}")
        need = capacity_for(snapshot, queries, self.shape, self.num_sms, self.gpu)
        self.capacity.check(need, "a plan of this tree")

    def plan(self) -> list[Tensor]:
        """Launch the planner on the current stream; the tensors hold the plan when it ends.  Can be captured.

        A tree that was not checked, and whose plan does not fit, gives an empty plan with ``counts[OVERFLOW] == 1``.
        """
        shared = self._function.max_shared // 4 * 4
        launch(self._function, PLAN_TREE, self._values, (1, 1, 1), _THREADS, shared, self._say)
        return self.work

    def _say(self) -> str:
        return f"plan_tree on {self._scratch.device}: room for {self.nodes} nodes, {self.capacity}"

    def arrays(self) -> list[np.ndarray]:
        """The plan's arrays cut to what they hold, on the host; waits for the device.  For tests and reports.

        Raises:
            PlanTooLarge: the plan did not fit.
        """
        counts, wide, narrow, segments, merge_indptr, merge_indices = (tensor.cpu().numpy() for tensor in self.work)
        if counts[OVERFLOW]:
            raise PlanTooLarge(f"the tree's plan does not fit {self.capacity}, {self.nodes} nodes")
        items = np.concatenate((wide[: counts[0]], narrow[: counts[1]]))
        used = int((items[:, 3] + items[:, 4] // 2).max(initial=0))
        return [
            counts,
            wide[: counts[0]],
            narrow[: counts[1]],
            segments[:used],
            merge_indptr[: counts[2] + 1],
            merge_indices[: counts[3]],
        ]
