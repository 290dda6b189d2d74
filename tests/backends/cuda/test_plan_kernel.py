"""The GPU planner's own source, run on the CPU thread by thread: the specified plan, bit by bit, without a GPU."""

import ctypes
import shutil
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from prefixkit.attention.bsr import MaskKind
from prefixkit.attention.gpu.capacity import capacity_for, scratch_ints
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.gpu.gpu_plan import FEW_KV_TILES
from prefixkit.attention.paths.runs import runs_of
from prefixkit.attention.plan import KINDS
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import build_step
from prefixkit.attention.visible import ALL
from prefixkit.backends.cuda.device_planner import TREE_TENSORS, WORK_TENSORS, CudaPlanner
from prefixkit.backends.cuda.kernels import plan_unit
from prefixkit.backends.cuda.layouts import PLAN_TREE
from prefixkit.backends.cuda.plan_launch import planned_tree
from prefixkit.testing.named_trees import leaf_queries, tree, tree_of
from prefixkit.testing.random_plans import (
    deep_tree,
    random_cost,
    random_shape,
    random_tree,
    random_visible,
    size_of,
    specified,
)
from tests.emulation.build import build

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module", params=[False, True], ids=["nodes in shared memory", "any number of nodes"])
def kernels(request, tmp_path_factory):
    """The source with the block's instructions on the CPU in place of the GPU's, without and with heavy paths."""
    return [built(plan_unit(request.param, paths), tmp_path_factory) for paths in (False, True)]


@pytest.fixture(scope="module")
def kernel(kernels):
    """A launch of the kernel that a capacity asks for."""
    return lambda capacity, packed: kernels[capacity.paths](packed)


def built(unit, tmp_path_factory):
    """The kernel as a function of its packed parameter."""
    defines = (f"-D{name}={value}" for name, value in unit.defines)
    function = build(tmp_path_factory.mktemp("kernel"), "planner", {}, unit.headers, *defines).plan_on_cpu
    function.argtypes = [ctypes.c_char_p]
    return function


def run(kernel, snapshot, queries, shape, cost, num_sms, capacity, *, paths=False, tiles=ALL):
    """The arrays as the kernel leaves them, in buffers of this capacity, poisoned first."""
    tree = StepTree(snapshot, queries)
    columns = planned_tree(tree, paths=bool(capacity.paths))
    columns[1] = paths
    if paths and (runs := runs_of(snapshot)) is not None:  # also of trees that are not deep
        columns[-snapshot.num_nodes :] = runs.of
    return launch(kernel, shape, cost, num_sms, capacity, columns, tiles)


def launch(kernel, shape, cost, num_sms, capacity, tree, tiles=ALL):
    """The same from what ``planned_tree`` makes of a tree."""
    columns = 6 if capacity.paths else 4
    nodes = len(tree) // columns
    tree = np.ascontiguousarray(tree)
    addresses = [tree.ctypes.data, *(tree[2 + nodes * column :].ctypes.data for column in range(columns))]
    addresses += [0] * (6 - columns)
    plan = [np.full(shape_, -12345, dtype=np.int32) for shape_ in capacity.shapes()]
    work = *map(len, plan[1:3]), capacity.rows, len(plan[3]) * capacity.paths
    scratch = np.full(scratch_ints(nodes, *work), -12345, dtype=np.int32)
    sharing, low_heads = cost.sharing, cost.low_tile_heads or cost.sharing.tile_heads
    many, low = (max(1, tile_heads // shape.gqa_group) for tile_heads in (sharing.tile_heads, low_heads))
    few = FEW_KV_TILES * cost.tile.kv_tile if cost.low_tile_heads else -1
    roles = [n for role in (cost.tile, cost.decode) for n in (role.kv_tile, role.workers, *role.points(), role.least)]
    values = (
        *addresses,
        *(array.ctypes.data for array in (*plan, scratch)),
        *(sharing.kv_byte * shape.kv_bytes, sharing.item),
        *(sharing.tile_item * shape.kv_heads, sharing.decode_item * shape.kv_heads),
        *(sharing.partial_byte * shape.partial_bytes, sharing.tile_path),
        *(cost.tile.tokens_per_us, cost.decode.tokens_per_us),
        *(-(-(2**32) // of) for of in (many, low)),
        *(nodes, *map(len, plan[1:4]), capacity.rows, len(plan[5])),
        *(shape.gqa_group, shape.kv_heads, num_sms, many, low, few, sharing.decode_heads, sharing.read_by_tiles),
        *(*tiles.numbers, 48 * 1024),
        *roles,
    )
    kernel(capacity, PLAN_TREE.packer.pack(*values))
    return plan


def assert_same(arrays, plan, case):
    names = ("counts", "tile_items", "decode_items", "segments", "indptr", "indices", "limits")
    for name, ours, theirs in zip(names, arrays, plan.arrays(), strict=True):
        assert np.array_equal(ours[: len(theirs)], theirs), (case, name)


SIZES = {
    "small": (12, 8, 60, 3, 0.6),
    "middling": (6, 300, 400, 2, 0.5),
    "chunks": (4, 20, 3000, 300, 0.5),
    "long": (6, 40, 200_000, 1, 0.7),
}


@pytest.mark.drawn(2)
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


def test_few_queries_give_the_specified_plan_bit_by_bit(kernel):
    """Where all that is shared in tiles is less than their path costs, none of it is."""
    shape, left_out = HeadShape(8, 1, 128, 2), Counter()
    for seed in range(24):
        rng, paths = np.random.default_rng(seed), bool(seed % 2)
        tree = deep_tree(rng, 30) if paths else StepTree(*random_tree(rng, 12, 900, 1, 0.7))
        cost = replace(H200, sharing=replace(H200.sharing, tile_path=float(rng.choice([0.05, 1.0]))))
        case = tree.snapshot, tree.queries, shape, cost, 132
        plan, sharing = specified(*case, paths=paths), replace(cost, sharing=replace(cost.sharing, tile_path=0.0))
        assert_same(run(kernel, *case, capacity_for(tree, shape, 132, cost, paths=paths), paths=paths), plan, seed)
        had_tiles = len(specified(*case[:3], sharing, 132, paths=paths).tile_items) > 0
        left_out[paths, had_tiles and not len(plan.tile_items)] += had_tiles
    assert all(left_out[case] for case in product((False, True), repeat=2)), left_out


def test_deep_trees_give_the_specified_plan_by_paths_bit_by_bit(kernel):
    """Combs and search trees; with adjacent nodes, queries in inner nodes, missing tokens, windows."""
    kinds, runs = Counter(), 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        tree = deep_tree(rng, (20, 100, 400)[seed % 3])
        shape, cost, sms = random_shape(rng), random_cost(rng), int(rng.choice([1, 5, 132]))
        case, tiles = (tree.snapshot, tree.queries, shape, cost, sms), random_visible(rng)
        plan = specified(*case, paths=True, tiles=tiles)
        kinds.update((plan.items[:, 4] % KINDS).tolist())
        runs += int((plan.segments[:, 0] >= tree.snapshot.num_nodes).sum())
        for capacity in (capacity_for(tree, shape, sms, cost, paths=True), size_of(plan)._replace(paths=1)):
            assert_same(run(kernel, *case, capacity, paths=True, tiles=tiles), plan, (seed, tiles))
        if seed % 4 == 0:  # the same kernel makes plans node by node
            capacity = capacity_for(tree, shape, sms, cost)._replace(paths=1)
            assert_same(run(kernel, *case, capacity), specified(*case), seed)
    assert kinds[MaskKind.LIMIT] > 20
    assert runs > 20


@pytest.mark.parametrize("name", ["spine p2048 d1023 t1 s16", "spine p512 d256 t3 s1-400", "search p700 n400 t5-60"])
def test_deep_trees_of_the_benchmark(kernel, name):
    snapshot, shape = tree_of(name), HeadShape(32, 8, 128, 2)
    queries = leaf_queries(snapshot)
    tree = StepTree(snapshot, queries)
    plan = specified(snapshot, queries, shape, H200, 132, paths=True)
    assert tree.is_deep
    assert (plan.items[:, 4] % KINDS == MaskKind.LIMIT).any()
    capacity = capacity_for(tree, shape, 132, paths=True)
    assert_same(run(kernel, snapshot, queries, shape, H200, 132, capacity, paths=True), plan, name)


@pytest.mark.parametrize("short", ["tile_items", "decode_items", "segments", "rows", "partials"])
def test_a_plan_by_paths_that_does_not_fit_is_empty_and_says_so(kernel, short):
    snapshot, shape = tree_of("search p700 n400 t5-60"), HeadShape(32, 8, 128, 2)
    queries = leaf_queries(snapshot)
    need = size_of(specified(snapshot, queries, shape, H200, 132, paths=True))
    tight = need._replace(**{short: getattr(need, short) - 1}, paths=1)
    arrays = run(kernel, snapshot, queries, shape, H200, 132, tight, paths=True)
    assert arrays[0].tolist() == [0, 0, len(queries.node), 0, 0, 0, 0, 1]


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
            return [torch.from_numpy(array) for array in launch(kernel, shape, cost, sms, capacity, tree.numpy())]

        host, there = (CudaPlanner(shape, cost, sms, by) for by in (None, plan_there))
        for version in range(4):
            snapshot, queries = random_tree(rng, int(rng.integers(1, 60)), 400, 3, 0.6)
            if version % 2:
                deep = deep_tree(rng, 90)
                snapshot, queries = deep.snapshot, deep.queries
            snapshot = replace(snapshot, version=version)
            for _ in range(2):  # the second time both remember
                tokens = np.zeros(queries.num_rows, dtype=np.int64)
                ours, theirs = (
                    build_step(StepTree(snapshot, queries), tokens, tokens[:1], p, device) for p in (there, host)
                )
                assert ours.plans[0].count_reads is not None, "counted without the plan on the host"
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
