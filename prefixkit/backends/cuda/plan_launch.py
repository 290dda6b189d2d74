"""Plans made on the GPU: one launch, which a CUDA graph can capture, makes a plan's arrays from the tree's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.gpu.capacity import NODE_INTS, PlanCapacity, PlanTooLarge, capacity_for, scratch_ints
from prefixkit.attention.gpu.gpu_cost import H200, GpuCost
from prefixkit.attention.gpu.gpu_plan import FEW_KV_TILES
from prefixkit.attention.gpu.staging import Staged, carve, carved_size
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.visible import ALL, Visible
from prefixkit.backends.cuda.kernels import PLAN_NODES, plan_unit
from prefixkit.backends.cuda.layouts import PLAN_TREE
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.ops import library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.tree.arrays import Ints

_THREADS = 1024


def plan_tree(*arguments: Any) -> None:
    """``plan_tree``."""
    *tensors, heads, num_sms, cost, seen = arguments
    _, tile_items, decode_items, segments, merge_indptr, merge_indices, _ = tensors[7:14]
    nodes, device = len(tensors[1]), tensors[1].device
    function = _function(nodes > PLAN_NODES, len(tensors[5]) > 0, device.index)
    rates, magics, heads_of, roles = _constants(tuple(heads), num_sms, tuple(cost))
    sizes = nodes, len(tile_items), len(decode_items), len(segments), len(merge_indptr) - 1, len(merge_indices)
    addresses = (tensor.data_ptr() for tensor in tensors)
    values = *addresses, *rates, *magics, *sizes, *heads_of, *seen, function.max_shared // 4, *roles
    describe = f"plan_tree on {device}: capacity for {sizes} nodes, items, segments, rows and partials".__str__
    launch(function, PLAN_TREE, values, (1, 1, 1), _THREADS, function.max_shared // 4 * 4, describe)


@cache
def _function(large: bool, paths: bool, device: int) -> jit.Function:
    small, any_size = plan_unit(False, paths), plan_unit(True, paths)
    function = jit.load(small, device)[small.names[0]]
    if large or function.max_shared < 4 * NODE_INTS * (PLAN_NODES + 4):
        function = jit.load(any_size, device)[any_size.names[0]]
    return PLAN_TREE.check(function)


@lru_cache(maxsize=64)
def _constants(
    heads: tuple[int, ...], num_sms: int, cost: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[int, int], tuple[int, ...], tuple[int, ...]]:
    """The kernel's parameters for heads and costs.

    In order: sharing and rates; magic numbers; heads, SMs, queries of a tile and of a low tile, tokens up to which
    tiles are low, rows of a decode item, whether tiles read; roles.
    """
    shape, gpu = HeadShape(*heads), GpuCost.of(cost)
    sharing, low_heads = gpu.sharing, gpu.low_tile_heads or gpu.sharing.tile_heads
    many, low_many = (max(1, tile_heads // shape.gqa_group) for tile_heads in (sharing.tile_heads, low_heads))
    few_tokens = FEW_KV_TILES * gpu.tile.kv_tile if gpu.low_tile_heads else -1
    rates = (
        sharing.kv_byte * shape.kv_bytes,
        sharing.item,
        sharing.tile_item * shape.kv_heads,
        sharing.decode_item * shape.kv_heads,
        sharing.partial_byte * shape.partial_bytes,
        sharing.tile_path,
        gpu.tile.tokens_per_us,
        gpu.decode.tokens_per_us,
    )
    roles = tuple(
        n for role in (gpu.tile, gpu.decode) for n in (role.kv_tile, role.workers, *role.points(), role.least)
    )
    tiles = many, low_many, few_tokens
    heads_of = shape.gqa_group, shape.kv_heads, num_sms, *tiles, sharing.decode_heads, sharing.read_by_tiles
    return rates, (-(-(2**32) // many), -(-(2**32) // low_many)), heads_of, roles


def planned_tree(tree: StepTree, *, paths: bool) -> Ints:
    """The planner's input for a tree, in one array.

    In order: the number of nodes, 1 for plans by heavy paths, and the arrays of nodes that :class:`GraphPlanner` names;
    the last two only with ``paths``.
    """
    snapshot = tree.snapshot
    columns = [snapshot.parent, snapshot.subtree_end, tree.length, tree.own_rows]
    if paths:
        columns += [snapshot.start, _run_of(tree)]
    return np.concatenate(([snapshot.num_nodes, paths], *columns)).astype(np.int32)


def _run_of(tree: StepTree) -> Ints:
    return np.full(tree.snapshot.num_nodes, -1, np.int32) if tree.runs is None else tree.runs.of


def plan_on_gpu(shape: HeadShape, gpu: GpuCost, num_sms: int, capacity: PlanCapacity, tree: Tensor) -> list[Tensor]:
    """Plan on the current stream, into new tensors for ``tree_attention``; the host does not wait.

    ``tree`` is int32, made by :func:`planned_tree`, with paths if the capacity has paths.  GQA groups have at most the
    ``tile_heads`` of the cost.
    """
    columns, shapes = 6 if capacity.paths else 4, capacity.shapes()
    nodes = len(tree) // columns
    sizes, *arrays = torch.split(tree, [2] + [nodes] * columns)
    arrays += [tree[:0]] * (6 - columns)
    work = carve(
        torch.empty(carved_size(shapes), dtype=torch.int32, device=tree.device), [(part, False) for part in shapes]
    )
    # Freed on return, because its next user runs later on this stream.
    scratch = _scratch(nodes, work, capacity, tree.device)
    torch.ops.prefixkit.plan_tree(sizes, *arrays, *work, scratch, shape.plan_heads, num_sms, gpu.numbers, ALL.numbers)
    return work


def _scratch(nodes: int, work: Sequence[Tensor], capacity: PlanCapacity, device: torch.device) -> Tensor:
    _, tile_items, decode_items, segments, merge_indptr, *_ = work
    of_paths = len(segments) if capacity.paths else 0
    size = scratch_ints(nodes, len(tile_items), len(decode_items), len(merge_indptr) - 1, of_paths)
    return torch.empty(size, dtype=torch.int32, device=device)


class GraphPlanner:
    """Makes plans equal to those of ``make_gpu_plan``, on the GPU, into static buffers.

    :meth:`upload` uploads a tree, :meth:`plan` launches the planner.  A graph that captured :meth:`plan` plans anew at
    every replay, from the present content of the tree's tensors, which the host uploaded or kernels wrote.

    Args:
        shape, nodes, capacity, device, gpu, num_sms: As the attributes, or as :func:`make_gpu_plan` takes them.
        paths: Plan deep trees by heavy paths; the tree that attention reads then has the runs after its nodes.
        visible: The range of keys that queries see: tiles of paths start at the first key that a query of theirs sees;
            other items are read whole.
        now: A tree fits if its plan at the present lengths of its nodes does; else if any does, whatever the lengths
            become.

    Attributes:
        capacity: The most that a plan may hold.
        nodes: The most nodes that a tree may have.
        sizes: ``[2]`` the number of nodes, and 1 if plans are by heavy paths; on the device, as are the following.
        parent, subtree_end: ``[nodes]`` as in the snapshot.
        length: ``[nodes]`` tokens visible in the step; see ``StepTree``.
        own_rows: ``[nodes]`` query rows in each node.
        start, run: ``[nodes]`` each node's first position, and the run that it is a part of, or -1; without elements
            if the capacity is only for plans node by node.
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
        *,
        paths: bool = False,
        visible: Visible = ALL,
        now: bool = False,
    ) -> None:
        self.paths, self._now = paths, now
        self.shape, self.nodes, self.capacity, self.gpu = shape, nodes, capacity, gpu
        self._latest: tuple[StepTree, bool, PlanCapacity] | None = None
        target = torch.device(device)
        self.num_sms = num_sms or torch.cuda.get_device_properties(target).multi_processor_count
        most = max(nodes, 1)
        self._tree = Staged([(4,), *[(most,)] * 4, *[(most if capacity.paths else 0,)] * 2], target)
        sizes, self.parent, self.subtree_end, self.length, self.own_rows, self.start, self.run = self._tree.tensors
        self.sizes = sizes[:2]
        self._plan = Staged(capacity.shapes(), target)
        self.work: list[Tensor] = self._plan.tensors
        self._scratch = _scratch(most, self.work, capacity, target)
        tree = self.sizes, *self._tree.tensors[1:]
        numbers = shape.plan_heads, self.num_sms, gpu.numbers, visible.numbers
        self._arguments = *tree, *self.work, self._scratch, *numbers

    def upload(self, tree: StepTree) -> None:
        """Upload a tree and its queries, which are not checked: one copy on the current stream, without a wait.

        Raises:
            PlanTooLarge: some plan of this tree might not fit, whatever its nodes' lengths become; nothing has changed.
        """
        self.stage(tree)
        self._tree.upload()

    def enqueue_copy(self) -> None:
        """Copy what :meth:`stage` wrote last to the device.  Can be captured."""
        self._tree.enqueue_copy()

    def holds(self, tree: StepTree) -> bool:
        """Whether any plan of a tree fits, whatever its nodes' lengths become."""
        return self.capacity.holds(self._need(tree)[1])

    def by_paths(self, tree: StepTree) -> bool:
        """Whether plans of a tree are by heavy paths.

        They are if the tree is deep; or if the capacity was made for deep trees and a plan node by node would not fit,
        so that a tree that is deep only at times can use one capacity.
        """
        return self._need(tree)[0]

    def _need(self, tree: StepTree) -> tuple[bool, PlanCapacity]:
        """Whether plans of a tree are by heavy paths, and the capacity for any of them; known for the latest tree."""
        if self._latest is None or self._latest[0] is not tree:
            of = tree, self.shape, self.num_sms, self.gpu
            paths = self.paths and tree.is_deep
            need = capacity_for(*of, paths=paths, now=self._now)
            if self.paths and self.capacity.paths and not (paths or self.capacity.holds(need)):
                paths, need = True, capacity_for(*of, paths=True, now=self._now)
            self._latest = tree, paths, need
        return self._latest[1:]

    def stage(self, tree: StepTree) -> None:
        """The host's part of :meth:`upload`."""
        count = tree.snapshot.num_nodes
        if count > self.nodes:
            raise PlanTooLarge(f"the tree has {count} nodes, but the planner has capacity for {self.nodes}")
        by_paths, need = self._need(tree)
        self.capacity.check(need, "a plan of this tree")
        sizes, parent, subtree_end, length, own_rows, start, run = self._tree.writable()
        sizes[:2] = count, by_paths
        if by_paths:
            start[:count], run[:count] = tree.snapshot.start, _run_of(tree)
        parent[:count], subtree_end[:count] = tree.snapshot.parent, tree.snapshot.subtree_end
        length[:count], own_rows[:count] = tree.length, tree.own_rows

    def plan(self) -> list[Tensor]:
        """Launch the planner on the current stream; the tensors hold the plan when it ends.  Can be captured.

        A plan that does not fit, of a tree that was not checked, comes out empty, with ``counts[OVERFLOW] == 1``.
        """
        torch.ops.prefixkit.plan_tree(*self._arguments)
        return self.work
