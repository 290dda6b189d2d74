"""Plans made on the GPU: one launch that a CUDA graph can capture, from the tree's arrays to a plan's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.capacity import NODE_INTS, OVERFLOW, PlanCapacity, PlanTooLarge, capacity_for, scratch_ints
from prefixkit.attention.gpu_cost import H200, GpuCost
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.staging import Staged, carve, carved_size
from prefixkit.backends.cuda.layouts import PLAN_TREE
from prefixkit.backends.cuda.units import PLAN, PLAN_LARGE, PLAN_NODES
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.ops import library  # noqa: F401  (declares torch.ops.prefixkit)

_THREADS = 1024


def plan_tree(
    num_nodes: Tensor,
    parent: Tensor,
    subtree_end: Tensor,
    length: Tensor,
    own: Tensor,
    counts: Tensor,
    tile_items: Tensor,
    decode_items: Tensor,
    segments: Tensor,
    merge_indptr: Tensor,
    merge_indices: Tensor,
    scratch: Tensor,
    heads: Sequence[int],
    num_sms: int,
    cost: Sequence[float],
) -> None:
    """``plan_tree``."""
    function = _function(len(parent) > PLAN_NODES, parent.device.index)
    rates, magic, heads_of, roles = _constants(tuple(heads), num_sms, tuple(cost))
    trees = num_nodes, parent, subtree_end, length, own
    work = counts, tile_items, decode_items, segments, merge_indptr, merge_indices, scratch
    sizes = len(parent), len(tile_items), len(decode_items), len(segments), len(merge_indptr) - 1, len(merge_indices)
    addresses = (tensor.data_ptr() for tensor in (*trees, *work))
    values = *addresses, *rates, magic, *sizes, *heads_of, function.max_shared // 4, *roles
    say = f"plan_tree on {parent.device}: capacity for {sizes} nodes, items, segments, rows and partials".__str__
    launch(function, PLAN_TREE, values, (1, 1, 1), _THREADS, function.max_shared // 4 * 4, say)


@cache
def _function(large: bool, device: int) -> jit.Function:
    function = jit.load(PLAN, device)[PLAN.names[0]]
    if large or function.max_shared < 4 * NODE_INTS * (PLAN_NODES + 4):
        function = jit.load(PLAN_LARGE, device)[PLAN_LARGE.names[0]]
    PLAN_TREE.check(function)
    return function


@lru_cache(maxsize=64)
def _constants(
    heads: tuple[int, ...], num_sms: int, cost: tuple[float, ...]
) -> tuple[tuple[float, ...], int, tuple[int, ...], tuple[int, ...]]:
    """What the kernel's parameter says of heads and costs: sharing and rates; the magic number; heads, SMs, queries; roles."""
    shape, gpu = HeadShape(*heads), GpuCost.of(cost)
    sharing, many = gpu.sharing, max(1, gpu.sharing.tile_heads // shape.group)
    rates = (
        sharing.kv_byte * shape.kv_bytes,
        sharing.item,
        sharing.tile_item * shape.kv_heads,
        sharing.decode_item * shape.kv_heads,
        sharing.partial_byte * shape.partial_bytes,
        gpu.tile.tokens_per_us,
        gpu.decode.tokens_per_us,
    )
    roles = tuple(
        n for role in (gpu.tile, gpu.decode) for n in (role.kv_tile, role.workers, *role.points(), role.least)
    )
    return rates, -(-(2**32) // many), (shape.group, shape.kv_heads, num_sms, many), roles


def plan_on_gpu(shape: HeadShape, gpu: GpuCost, num_sms: int, capacity: PlanCapacity, tree: Tensor) -> list[Tensor]:
    """Plan on the current stream, into tensors of the plan's own; the host does not wait.

    Args:
        shape, gpu, num_sms: What to plan for; groups of at most the ``tile_heads`` of its cost.
        capacity: What the plan may hold.
        tree: ``[4 * nodes + 1]`` int32: parent, subtree_end, length, own, as :class:`GraphPlanner` has them; how many nodes.

    Returns:
        The plan as ``tree_attention`` takes it, once the launch has ended.
    """
    nodes, shapes = len(tree) // 4, capacity.shapes()
    *arrays, num_nodes = torch.split(tree, [nodes] * 4 + [1])
    flat = torch.empty(carved_size(shapes), dtype=torch.int32, device=tree.device)
    work = carve(flat, [(part, False) for part in shapes])
    # Given back on return: who takes it next comes later on this stream.
    scratch = _scratch(nodes, work, tree.device)
    torch.ops.prefixkit.plan_tree(num_nodes, *arrays, *work, scratch, astuple(shape), num_sms, gpu.numbers)
    return work


def _scratch(nodes: int, work: Sequence[Tensor], device: torch.device) -> Tensor:
    _, tile_items, decode_items, _, merge_indptr, _ = work
    size = scratch_ints(nodes, len(tile_items), len(decode_items), len(merge_indptr) - 1)
    return torch.empty(size, dtype=torch.int32, device=device)


class GraphPlanner:
    """Makes plans equal to ``make_plan``'s, on the GPU, into buffers whose addresses stay.

    :meth:`load` brings a tree, :meth:`plan` launches the planner.  A graph that captured :meth:`plan` plans anew at every
    replay, from what the tree's tensors hold then: loaded by the host before, or written by kernels.

    Attributes:
        capacity: What a plan may hold.
        nodes: How many nodes a tree may have.
        num_nodes: ``[1]`` nodes of the tree, on the device, as are the following.
        parent, subtree_end: ``[nodes]`` as in the snapshot.
        length: ``[nodes]`` tokens visible in the step; see ``StepTree``.
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
        self._scratch = _scratch(max(nodes, 1), self.work, target)
        tree = self.num_nodes, self.parent, self.subtree_end, self.length, self.own
        self._arguments = *tree, *self.work, self._scratch, astuple(shape), self.num_sms, gpu.numbers

    def load(self, tree: StepTree) -> None:
        """Bring a tree and its queries to the device: one copy on the current stream, for which the host does not wait.

        Raises:
            ValueError: the queries leave out KV that they need.
            PlanTooLarge: some plan of this tree might not fit; nothing has changed.
        """
        tree.check()
        self.check(tree)
        count = tree.snapshot.num_nodes
        sizes, parent, subtree_end, length, own = self._tree.begin()
        sizes[0] = count
        parent[:count], subtree_end[:count] = tree.snapshot.parent, tree.snapshot.subtree_end
        length[:count], own[:count] = tree.length, tree.own
        self._tree.send()

    def check(self, tree: StepTree) -> None:
        """Raise PlanTooLarge unless every plan of this tree fits, whatever its nodes' lengths become."""
        count = tree.snapshot.num_nodes
        if count > self.nodes:
            raise PlanTooLarge(f"the tree has {count} nodes, but the planner has capacity for {self.nodes}")
        self.capacity.check(capacity_for(tree, self.shape, self.num_sms, self.gpu), "a plan of this tree")

    def plan(self) -> list[Tensor]:
        """Launch the planner on the current stream; the tensors hold the plan when it ends.  Can be captured.

        A tree that was not checked, and whose plan does not fit, gives an empty plan with ``counts[OVERFLOW] == 1``.
        """
        torch.ops.prefixkit.plan_tree(*self._arguments)
        return self.work

    def arrays(self) -> list[np.ndarray]:
        """The plan's arrays cut to what they hold, on the host; waits for the device.  For tests and reports.

        Raises:
            PlanTooLarge: the plan did not fit.
        """
        counts, tile_items, decode_items, segments, merge_indptr, merge_indices = (
            tensor.cpu().numpy() for tensor in self.work
        )
        if counts[OVERFLOW]:
            raise PlanTooLarge(f"the tree's plan does not fit {self.capacity}, {self.nodes} nodes")
        items = np.concatenate((tile_items[: counts[0]], decode_items[: counts[1]]))
        used = int((items[:, 3] + items[:, 4] // 2).max(initial=0))
        return [
            counts,
            tile_items[: counts[0]],
            decode_items[: counts[1]],
            segments[:used],
            merge_indptr[: counts[2] + 1],
            merge_indices[: counts[3]],
        ]
