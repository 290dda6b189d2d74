"""The decode path's own source for Hopper, run on the CPU thread by thread: against float64, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import Queries
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.variants import CAUSAL, attention_sinks, chunked, sliding_window, variant
from prefixkit.attention.variants.gallery import streaming
from prefixkit.backends.cuda.kernels import attention_unit, kernel_for
from prefixkit.cuda.nvrtc import Unit
from prefixkit.ops.arguments import FP8
from prefixkit.testing.forests import make_snapshot, random_parents, random_queries
from prefixkit.testing.named_trees import leaf_queries, tree_of
from prefixkit.variants import streaming_llm
from tests.attention.rotations import fresh_rng
from tests.backends.cuda.decode_emulation import HOLDING, attend, check, random_case
from tests.emulation.build import build

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source for a head size and a variant, with a block's instructions on the CPU in place of the GPU's.

    Variants that differ in captured values alone have one source, which is built once.
    """

    @cache
    def made(unit: Unit):
        folder, defines = tmp_path_factory.mktemp("decode"), [f"-D{name}={value}" for name, value in unit.defines]
        function = build(folder, "decode", {"attention/plan.cuh": HOLDING}, unit.headers, *defines).decode_on_cpu
        function.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        return function

    return lambda dim=64, variant=CAUSAL, group=1, e4m3=False: made(
        attention_unit(kernel_for("sm_90a", dim, group, e4m3=e4m3), dim, False, variant)
    )


@pytest.fixture(scope="module", params=[64, 128])
def kernel(request, built):
    """Head size, and the source for it."""
    return request.param, built(request.param)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("heads", [(8, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("tokens", [2, 16, 17, 33, 300])
def test_lone_sequences(kernel, heads, tokens):
    rng = np.random.default_rng(tokens)
    snapshot, pages = make_snapshot(rng, [-1] * 5, [tokens] * 5, 16, orderly=True)
    queries = Queries(*(np.array(x, np.int32) for x in (range(5), [tokens - 1] * 5, [tokens] * 5)))
    dim, run = kernel
    check(run, random_case(rng, snapshot, pages, queries, *heads, dim, spread=1.0))


def test_sinks_join_the_rows_that_an_item_finishes(built):
    rng = np.random.default_rng(0)
    snapshot, pages = make_snapshot(rng, [-1] * 5, [33] * 5, 16, orderly=True)
    queries = Queries(*(np.array(x, np.int32) for x in (range(5), [32] * 5, [33] * 5)))
    case = random_case(rng, snapshot, pages, queries, 6, 3, 64, spread=1.0)
    case = replace(case, sinks=torch.tensor([-30.0, -1.0, 0.0, 2.5, 4.0, 30.0]).bfloat16())
    out, lse = attend(built(64, attention_sinks()), case, stages=3, blocks=1)
    where = case.snapshot, case.row_node, case.positions.numpy()
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, attention_sinks(), case.sinks)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("variant", [sliding_window(9), chunked(12), chunked(40)], ids=lambda variant: variant.name)
def test_plans_of_visible_ranges(built, variant):
    """Segments that begin inside nodes, and shared nodes that some queries do not see."""
    run = built(64, variant)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        snapshot, pages = make_snapshot(rng, [-1, 0, 0, 2, 2, 0], rng.integers(1, 60, 6).tolist(), 16)
        case = random_case(rng, snapshot, pages, random_queries(rng, snapshot), 6, 3, 64, spread=1.0)
        out, lse = attend(run, case, stages=3, blocks=1 + seed % 3, variant=variant)
        where = case.snapshot, case.row_node, case.positions.numpy()
        exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, variant)
        torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=2e-2, check_dtype=False)


@pytest.mark.parametrize("part", [0, 1], ids=["window", "sinks"])
@pytest.mark.parametrize(("sinks", "size"), [(1, 9), (4, 30), (40, 16)])
def test_the_parts_of_attention_at_positions_in_the_cache(built, sinks, size, part):
    """Some items see nothing, and nodes end in the middle; of what no query sees, results are 0 and -inf."""
    of, window = streaming_llm(sinks, size).parts[part], size
    run = built(64, of)
    shown = (
        variant(mask_mod=lambda b, h, q, kv: (kv <= q) & (kv >= sinks) & (q - kv < window)),
        variant(mask_mod=lambda b, h, q, kv: (kv <= q) & (kv < sinks)),
    )[part]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        snapshot, pages = make_snapshot(rng, [-1, 0, 0, 2, 2, 0], rng.integers(1, 60, 6).tolist(), 16)
        case = random_case(rng, snapshot, pages, random_queries(rng, snapshot), 6, 3, 64, spread=1.0)
        out, lse = attend(run, case, stages=3, blocks=1 + seed % 3, variant=of)
        where = case.snapshot, case.row_node, case.positions.numpy()
        exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, shown)
        torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(out, exact.out, rtol=0, atol=4e-3, check_dtype=False)


@pytest.mark.parametrize("variant", [CAUSAL, sliding_window(9)], ids=lambda variant: variant.name)
@pytest.mark.parametrize("name", ["spine p20 d36 t1-3 s1-9", "search p9 n30 t1-6", "comb d33 b1 t5 s3"])
def test_plans_of_heavy_paths(built, name, variant):
    """Lists of which each query sees a prefix, over slices of runs."""
    snapshot = tree_of(name)
    rng = np.random.default_rng(0)
    queries = leaf_queries(snapshot)
    case = random_case(rng, snapshot, len(snapshot.pages), queries, 6, 3, 64, spread=1.0)
    out, lse = attend(built(64, variant), case, stages=3, blocks=2, variant=variant, paths=True)
    where = case.snapshot, case.row_node, case.positions.numpy()
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, variant)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=2e-2, check_dtype=False)


TABLE = torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) < 0.3
MASKS = {
    "blocks": variant(mask_mod=lambda b, h, q, kv: TABLE[q // 16 % 40, kv // 16 % 40] & (kv <= q)),
    "documents": variant(mask_mod=lambda b, h, q, kv: (q // 50 == kv // 50) & (kv <= q)),
    "streaming": streaming(4, 40),
    "two windows": variant(mask_mod=lambda b, h, q, kv: ((q - kv < 17) | (kv % 64 < 9)) & (kv <= q)),
    "rows": variant(mask_mod=lambda b, h, q, kv: TABLE[q % 40, kv // 16 % 40] & (kv <= q)),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mask", MASKS)
def test_hidden_blocks_are_not_read(built, mask):
    run, of = built(64, MASKS[mask]), MASKS[mask]
    for seed in range(4):  # each length of nodes, with classes of blocks and without
        rng = np.random.default_rng(seed)
        parents = random_parents(rng, int(rng.integers(1, 12)))
        lengths = rng.integers(0, [20, 90, 200][seed % 3], len(parents))
        lengths[-1] = max(1, lengths[-1])
        snapshot, pages = make_snapshot(rng, parents, lengths.tolist(), int(rng.choice([1, 16, 64])))
        case = random_case(rng, snapshot, pages, random_queries(rng, snapshot), 4, 2, 64, spread=1.0)
        out, lse = attend(run, case, stages=3, blocks=1 + seed % 3, variant=of, classes=seed % 2 == 0)
        where = case.snapshot, case.row_node, case.positions.numpy()
        exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, of)
        torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=2e-2, check_dtype=False)


@pytest.mark.parametrize(("shared", "is_merged"), [(100, False), (120, True)], ids=["one item", "two items"])
def test_rows_that_see_the_tokens_of_one_item_are_not_merged(built, shared, is_merged):
    """The items write outputs, in bfloat16, where a merge gives numbers between."""
    rng, of = fresh_rng(), MASKS["documents"]
    snapshot, pages = make_snapshot(rng, [-1, 0, 0, 0], [shared, 20, 24, 29], 16)
    ends = snapshot.length[1:].astype(np.int32)
    queries = Queries(np.arange(1, 4, dtype=np.int32), ends - 1, ends)
    case = random_case(rng, snapshot, pages, queries, 4, 2, 64, spread=1.0)
    out, lse = attend(built(64, of), case, stages=3, blocks=2, variant=of, classes=True)
    assert torch.equal(out, out.bfloat16().double()) != is_merged
    where = case.snapshot, case.row_node, case.positions.numpy()
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, of)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=2e-2, check_dtype=False)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(8))
def test_queries_see_no_token_of_their_ancestors_behind_their_limits(kernel, seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(2, 12)))
    lengths = rng.integers(0, [20, 90][seed % 2], len(parents))
    lengths[-1] = max(1, lengths[-1])
    snapshot, pages = make_snapshot(rng, parents, lengths.tolist(), int(rng.choice([1, 16])))
    dim, run = kernel
    heads = [(1, 1), (8, 1), (4, 2), (7, 1)][seed % 4]
    case = random_case(rng, snapshot, pages, random_queries(rng, snapshot), *heads, dim, spread=1.0)
    out, lse, mask = attend(run, case, stages=3, blocks=1 + seed % 3, limits=rng)
    numbers = np.repeat(np.arange(len(case.queries.node)), case.queries.end - case.queries.begin)
    where, options = (snapshot, case.row_node, case.positions.numpy()), {"variant": mask, "sequences": numbers}
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, **options)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=2e-2, check_dtype=False)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("padding", [1, 2, 11])
def test_rows_that_pad_a_batch_come_out_as_zeros_and_change_no_other(kernel, padding, blocks):
    rng = np.random.default_rng(padding)
    snapshot, pages = make_snapshot(rng, [-1, 0, 0], [40, 9, 17], 16, orderly=True)
    queries = Queries(*(np.array(x, np.int32) for x in ([1, 2], [8, 16], [9, 17])))
    dim, run = kernel
    case = random_case(rng, snapshot, pages, queries, 6, 3, dim, spread=1.0)
    alone, padded = attend(run, case, 3, blocks), attend(run, case, 3, blocks, padding)
    assert torch.equal(alone[0], padded[0][:2]) and torch.equal(alone[1], padded[1][:2])
    assert padded[0].shape[0] == 2 + padding and not padded[0][2:].any()
    assert bool((padded[1][2:] == -torch.inf).all())


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kernel", [64, 128, 256], indirect=True)
@pytest.mark.parametrize("seed", range(6))
def test_forests(kernel, seed):
    """Pages of every size; some with scores that differ so much that the base of exponentials rises again and again."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(1, 12)))
    lengths = rng.integers(0, [20, 90, 160][seed % 3], len(parents))
    lengths[-1] = max(1, lengths[-1])
    snapshot, pages = make_snapshot(rng, parents, lengths.tolist(), [1, 16, 64][seed // 2])
    queries = random_queries(rng, snapshot)
    heads = [(1, 1), (8, 1), (4, 2), (7, 1)][seed % 4]
    dim, run = kernel
    case = random_case(rng, snapshot, pages, queries, *heads, dim, spread=[1.0, 8.0][seed % 2])
    check(run, case, stages=2 + seed % 4, blocks=1 + seed % 3)


@pytest.fixture(scope="module", params=[64, 96])
def wide_kernel(request, built):
    """Head size, and the source whose warps take items in pairs."""
    return request.param, built(request.param, group=16)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("dim", "heads", "variant"),
    [(128, (16, 1), CAUSAL), (64, (12, 1), CAUSAL), (80, (6, 3), MASKS["blocks"])],
    ids=["groups of 16", "small heads", "masked"],
)
def test_pages_in_e4m3(built, dim, heads, variant):
    """Forests; queries and values of many magnitudes, some outside of float16, and NaN where no token is."""
    run = built(dim, variant, heads[0] // heads[1], e4m3=True)
    for seed, page_size in enumerate((16, 1, 64)):
        rng = np.random.default_rng(seed)
        parents = random_parents(rng, int(rng.integers(2, 8)))
        lengths = rng.integers(0, [20, 90][seed % 2], len(parents))
        lengths[-1] = max(1, lengths[-1])
        snapshot, pages = make_snapshot(rng, parents, lengths.tolist(), page_size)
        case = random_case(rng, snapshot, pages, random_queries(rng, snapshot), *heads, dim, spread=1.0, dtype=FP8)
        case.v_pages.copy_((case.v_pages.float() * 2.0 ** -(torch.arange(dim) % 8)).to(FP8))
        case.q.mul_(2.0 ** torch.from_numpy(rng.choice([-24, 0, 0, 4, 18], (len(case.q), heads[0], 1))))
        if variant is CAUSAL:
            check(run, case, stages=3, blocks=1 + seed % 3)
            continue
        out, lse = attend(run, case, stages=3, blocks=1 + seed % 3, variant=variant, classes=seed == 0)
        where = case.snapshot, case.row_node, case.positions.numpy()
        exact = reference_attention(
            *where, case.q, case.k_pages.bfloat16(), case.v_pages.bfloat16(), case.scale, variant
        )
        torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=2e-2, check_dtype=False)


def test_all_pairs_of_e4m3_become_the_same_numbers_without_a_conversion(tmp_path):
    """In float16; the other tests have bfloat16."""
    dtype, unit = torch.float16, attention_unit(kernel_for("sm_90a", 64, 1, e4m3=True), 64, True, CAUSAL)
    defines = [f"-D{name}={value}" for name, value in unit.defines]
    found = torch.empty(65536, 2, dtype=dtype)
    run = build(tmp_path, "decode", {"attention/plan.cuh": HOLDING}, unit.headers, *defines).widen_pairs
    run(ctypes.c_void_p(found.data_ptr()))
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(FP8).view(65536, 2)
    torch.testing.assert_close(found, pairs.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), pairs.to(dtype).signbit() | found.isnan())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(4))
def test_two_warps_take_groups_of_9_to_16_together(wide_kernel, seed):
    """Forests, alone and with limits of their queries; rings longer than one warp's."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(3, 7)))
    lengths = rng.integers(0, [20, 70][seed % 2], len(parents))
    lengths[-1] = max(1, lengths[-1])
    snapshot, pages = make_snapshot(rng, parents, lengths.tolist(), [1, 16, 64, 16][seed])
    heads = [(16, 1), (12, 1), (18, 2), (32, 2)][seed % 4]
    dim, run = wide_kernel
    case = random_case(rng, snapshot, pages, random_queries(rng, snapshot), *heads, dim, spread=[1.0, 8.0][seed // 2])
    check(run, case, stages=2 + seed, blocks=1 + seed % 3)
    out, lse, mask = attend(run, case, stages=2 + seed, blocks=1 + seed % 3, limits=rng)
    numbers = np.repeat(np.arange(len(case.queries.node)), case.queries.end - case.queries.begin)
    where, options = (snapshot, case.row_node, case.positions.numpy()), {"variant": mask, "sequences": numbers}
    exact = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, **options)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=3e-2, check_dtype=False)


def test_when_tokens_come_changes_no_bit(kernel):
    """Rings of other lengths, and boxes that land in another order each time."""
    rng = np.random.default_rng(7)
    snapshot, pages = make_snapshot(rng, [-1] * 9, rng.integers(1, 90, 9).tolist(), 16)
    ends = snapshot.length.astype(np.int32)
    queries = Queries(np.arange(9, dtype=np.int32), ends - 1, ends)
    dim, run = kernel
    case = random_case(rng, snapshot, pages, queries, 4, 2, dim, spread=1.0)
    first = attend(run, case, stages=2, blocks=1)
    for stages in (2, 3, 5):
        again = attend(run, case, stages, blocks=1)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
