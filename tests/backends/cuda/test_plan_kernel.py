"""The GPU planner's own source, run on the CPU thread by thread: the specified plan, bit by bit, without a GPU."""

import ctypes
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.attention.gpu.capacity import capacity_for
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.paths.heavy_paths import is_deep
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import build_step
from prefixkit.backends.cuda.device_planner import TREE_TENSORS, WORK_TENSORS, CudaPlanner
from prefixkit.backends.cuda.kernels import PLAN
from prefixkit.backends.cuda.layouts import PLAN_TREE
from prefixkit.testing.named_trees import tree, tree_of
from prefixkit.testing.random_plans import random_cost, random_shape, random_tree, size_of, specified
from tests.emulation.build import build

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module", params=[2304, 0], ids=["nodes in shared memory", "any number of nodes"])
def kernel(request, tmp_path_factory):
    """The source with the block's instructions on the CPU in place of the GPU's."""
    folder, nodes = tmp_path_factory.mktemp("kernel"), f"-DPREFIXKIT_PLAN_NODES={request.param}"
    function = build(folder, "planner", {}, PLAN.headers, nodes).plan_on_cpu
    function.argtypes = [ctypes.c_char_p]
    return function


def run(kernel, snapshot, queries, shape, cost, num_sms, capacity):
    """The six arrays as the kernel leaves them, in buffers of this capacity, poisoned first."""
    nodes = snapshot.num_nodes
    visible, own = StepTree(snapshot, queries).length, StepTree(snapshot, queries).own_rows
    tree = [
        np.ascontiguousarray(a, dtype=np.int32) for a in ([nodes], snapshot.parent, snapshot.subtree_end, visible, own)
    ]
    return launch(kernel, shape, cost, num_sms, capacity, tree)


def launch(kernel, shape, cost, num_sms, capacity, tree):
    """The same from the tree's five arrays."""
    nodes = len(tree[1])
    plan = [np.full(shape_, -12345, dtype=np.int32) for shape_ in capacity.shapes()]
    items = capacity.tile_items + capacity.decode_items + 8
    scratch = np.full(10 * (nodes + 8) + 13 * items + capacity.rows + 256, -12345, dtype=np.int32)
    sharing, many = cost.sharing, max(1, cost.sharing.tile_heads // shape.gqa_group)
    roles = [n for role in (cost.tile, cost.decode) for n in (role.kv_tile, role.workers, *role.points(), role.least)]
    values = (
        *(array.ctypes.data for array in (*tree, *plan, scratch)),
        *(sharing.kv_byte * shape.kv_bytes, sharing.item),
        *(sharing.tile_item * shape.kv_heads, sharing.decode_item * shape.kv_heads),
        *(sharing.partial_byte * shape.partial_bytes, cost.tile.tokens_per_us, cost.decode.tokens_per_us),
        -(-(2**32) // many),
        *(nodes, capacity.tile_items, capacity.decode_items, capacity.segments, capacity.rows, capacity.partials),
        *(shape.gqa_group, shape.kv_heads, num_sms, many, 48 * 1024),
        *roles,
    )
    kernel(PLAN_TREE.packer.pack(*values))
    return plan


def assert_same(arrays, plan, case):
    names = ("counts", "tile_items", "decode_items", "segments", "indptr", "indices", "limits")
    for name, ours, theirs in zip(names, arrays, plan.arrays(), strict=True):
        assert np.array_equal(ours[: len(theirs)], theirs), (case, name)


SIZES = {
    "small": (25, 8, 60, 3, 0.6),
    "middling": (6, 300, 400, 2, 0.5),
    "chunks": (4, 20, 3000, 300, 0.5),
    "long": (6, 40, 200_000, 1, 0.7),
}


@pytest.mark.parametrize("size", SIZES)
def test_random_trees_give_the_specified_plan_bit_by_bit(kernel, size):
    cases, nodes, longest, rows, density = SIZES[size]
    for seed in range(cases):
        rng = np.random.default_rng(1000 + seed)
        snapshot, queries = random_tree(rng, int(rng.integers(1, nodes + 1)), longest, rows, density)
        shape, cost, sms = random_shape(rng), random_cost(rng), int(rng.choice([1, 5, 132]))
        plan = specified(snapshot, queries, shape, cost, sms)
        arrays = run(
            kernel, snapshot, queries, shape, cost, sms, capacity_for(StepTree(snapshot, queries), shape, sms, cost)
        )
        assert_same(arrays, plan, (size, seed))
        assert_same(run(kernel, snapshot, queries, shape, cost, sms, size_of(plan)), plan, (size, seed, "exact room"))


def test_a_benchmark_tree(kernel):
    snapshot, shape = tree_of("beam d6"), HeadShape(32, 8, 128, 2)
    leaf = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1).astype(np.int32)
    queries = Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])
    capacity = capacity_for(StepTree(snapshot, queries), shape, 132)
    assert_same(
        run(kernel, snapshot, queries, shape, H200, 132, capacity), specified(snapshot, queries, shape, H200, 132), ""
    )


@pytest.mark.parametrize("leaves", [1, 3])
def test_long_nodes_in_hundreds_of_pieces(kernel, leaves):
    snapshot, shape = tree([-1] + [0] * leaves, [2**20] + [100 * 2**leaves] * leaves), HeadShape(8, 1, 128, 2)
    leaf = np.arange(1, leaves + 1, dtype=np.int32)
    queries = Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])
    for shape in (HeadShape(8, 1, 128, 2), HeadShape(2, 1, 128, 2), HeadShape(16, 2, 128, 2)):
        plan = specified(snapshot, queries, shape, H200, 132)
        now = capacity_for(StepTree(snapshot, queries), shape, 132, now=True)
        assert shape.gqa_group * leaves > 8 or len(plan.decode_items) > 255, "more than eight bits can number"
        assert_same(
            run(kernel, snapshot, queries, shape, H200, 132, now),
            plan,
            "",
        )


def test_a_planner_that_launches_it_makes_the_steps_of_one_that_does_not(kernel):
    """Trees change under both; their steps say the same, also of leaves that grow, without the plan on the host."""
    device = torch.device("cpu")
    for seed in range(6):
        rng = np.random.default_rng(seed)
        shape, cost, sms = random_shape(rng), random_cost(rng), int(rng.choice([1, 5, 132]))

        def plan_there(capacity, tree, shape=shape, cost=cost, sms=sms):
            *arrays, count = tree.split([len(tree) // 4] * 4 + [1])
            arrays = launch(kernel, shape, cost, sms, capacity, [part.numpy() for part in (count, *arrays)])
            return [torch.from_numpy(array) for array in arrays]

        host, there = (CudaPlanner(shape, cost, sms, by) for by in (None, plan_there))
        for version in range(4):
            snapshot, queries = random_tree(rng, int(rng.integers(1, 60)), 400, 3, 0.6)
            snapshot = replace(snapshot, version=version)
            for _ in range(2):  # the second time both remember
                tokens = np.zeros(queries.num_rows, dtype=np.int64)
                ours, theirs = (
                    build_step(StepTree(snapshot, queries), tokens, tokens[:1], p, device) for p in (there, host)
                )
                deep = is_deep(StepTree(snapshot, queries))  # planned in numpy by both
                assert (ours.plans[0].count_reads is None) == deep, "counted without the plan on the host"
                assert theirs.plans[0].count_reads is None
                for name in ("tokens", "positions", "slots", "logit_rows"):
                    assert torch.equal(getattr(ours, name), getattr(theirs, name))
                nodes = slice(WORK_TENSORS, WORK_TENSORS + TREE_TENSORS)
                assert all(torch.equal(a, b) for a, b in zip(ours.plan[nodes], theirs.plan[nodes], strict=True))
                arrays = [tensor.numpy() for tensor in ours.plan[:WORK_TENSORS]]
                assert_same(arrays, theirs.plans[0].plan, (seed, version))
                assert ours.kv_tokens[0] == theirs.kv_tokens[0]
                leaf = snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1
                longer = ours.length + 7 * leaf
                assert ours.plans[0].kv_tokens_read(longer) == theirs.plans[0].kv_tokens_read(longer)
                assert_same(ours.plans[0].plan.arrays(), theirs.plans[0].plan, (seed, version))
        assert there.plans_made == host.plans_made == 4
