"""The portable kernel, on whatever GPU is here: against float64, and against Hopper's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import Queries
from prefixkit.attention.variants import register
from prefixkit.backends.cuda.device_planner import planner_for, say_plain_torch
from prefixkit.backends.cuda.kernels import HOPPER_HEADS, KERNEL_VARIABLE
from prefixkit.backends.torch.host_planner import TorchPlanner
from prefixkit.ops import backend
from prefixkit.ops.backend import NotCapturable
from prefixkit.testing.forests import (
    PAGE_SIZES,
    SHARE_ALL,
    Case,
    fill,
    gpu_plan_of,
    int_tensors,
    make_snapshot,
    node_tensors,
    random_case,
)
from tests.gpu.cases import GPU, forget_launches, on_gpu, planned
from tests.gpu.oracle import Errors, dense, torch_error
from tests.gpu.test_tree_attention import HALF_ULP, run, variants

HEAD_DIMS = (16, 64, 80, 96, 112, 128, 192, 256)
GROUPS = (1, 4, 7, 8, 16, 71, 130)
DTYPES = (torch.bfloat16, torch.float16)


def choose(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on tree_attention takes this kernel."""
    monkeypatch.setenv(KERNEL_VARIABLE, kernel)
    forget_launches(monkeypatch)


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every test here runs the portable kernel, on Hopper too."""
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    backend.choose_again()
    request.addfinalizer(backend.choose_again)
    choose("portable", monkeypatch)


def heads_of(rng: np.random.Generator, group: int, head_dim: int) -> tuple[int, int, int]:
    kv_heads = 1 if group > 16 else int(rng.choice([1, 2, 3]))
    return kv_heads * group, kv_heads, head_dim


def deep_case(seed: int, dtype: torch.dtype, group: int, head_dim: int) -> Case:
    """A long node under many leaves of any length, one of which is computed whole: full tiles, and ragged ones."""
    rng = np.random.default_rng(seed)
    leaves = 16
    lengths = [int(rng.integers(200, 700)), *rng.integers(1, 150, leaves).tolist()]
    page_size = int(rng.choice(PAGE_SIZES[4:]))
    snapshot, num_pages = make_snapshot(rng, [-1] + [0] * leaves, lengths, page_size, orderly=bool(seed % 2))
    begin = np.array(lengths[1:]) - 1
    begin[5] = 0
    node = np.arange(1, leaves + 1, dtype=np.int32)
    queries = Queries(node, begin.astype(np.int32), np.array(lengths[1:], dtype=np.int32))
    return fill(rng, snapshot, num_pages, queries, heads_of(rng, group, head_dim), dtype)


def hold_against_torch(cases: list[tuple[int, Case, dict[str, int]]]) -> None:
    errors = Errors()
    for seed, case, options in cases:
        out, lse = run(case, options, seed)
        exact, exact_lse = dense(case)
        errors.add(seed, case, float((out.double() - exact).abs().max()), torch_error(case, exact))
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_forests_err_no_more_than_torch(head_dim, dtype):
    cases = []
    for seed, group in enumerate(GROUPS, head_dim):
        rng = np.random.default_rng(seed)
        case = random_case(rng, dtype, heads_of(rng, group, head_dim))
        options = {} if seed % 2 else {"num_sms": 5}
        cases.append((seed, case, options))
    hold_against_torch(cases)


@pytest.mark.parametrize(
    ("head_dim", "group"),
    [
        *((dim, group) for dim in HEAD_DIMS for group in (4, 71)),
        *((dim, g) for dim in (128, 256) for g in (1, 7, 8, 16, 130)),
    ],
)
def test_long_nodes_err_no_more_than_torch(head_dim, group):
    seeds = range(group, group + 2)
    hold_against_torch([(seed, deep_case(seed, torch.bfloat16, group, head_dim), {}) for seed in seeds])


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_variant_errs_no_more_than_torchs_arithmetic(head_dim, number):
    errors, dtype = Errors(), torch.bfloat16
    for seed, group in enumerate((1, 8, 16, 71), 300):
        case = deep_case(seed, dtype, group, head_dim)
        variant = variants(case.q.shape[1], np.random.default_rng(seed))[number]
        out, lse = run(case, {}, seed, register(variant))
        exact, exact_lse = dense(case, variant)
        plain, _ = dense(case, variant, dtype)
        theirs = max(float((plain.double() - exact).abs().max()), HALF_ULP[dtype] * float(exact.abs().max()))
        errors.add(seed, case, float((out.double() - exact).abs().max()), theirs)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()


@pytest.mark.parametrize("group", [1, 4, 8, 16, 71])
@pytest.mark.parametrize("head_dim", [k for k, v in HOPPER_HEADS if k == v])
def test_hoppers_kernel_and_the_portable_one_agree(head_dim, group, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there is one kernel for this GPU")
    case = deep_case(group, torch.bfloat16, group, head_dim)
    one, one_lse = run(case, {}, 1)
    choose("", monkeypatch)
    other, other_lse = run(case, {}, 1)
    exact, _ = dense(case)
    bound = 2 * (1.5 * torch_error(case, exact) + HALF_ULP[torch.bfloat16] * float(exact.abs().max()))
    assert float((one.double() - other.double()).abs().max()) <= bound
    torch.testing.assert_close(one_lse, other_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("group", [4, 71])
def test_a_graph_replays_the_same_bits(group):
    case = deep_case(9, torch.bfloat16, group, 256)
    call = on_gpu(case, planned(case, SHARE_ALL))
    attend = torch.ops.prefixkit.tree_attention
    expected = attend(*call.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(*call.arguments())
    for _ in range(3):
        for tensor in found:
            tensor.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_any_plan_runs_whatever_tiles_it_was_cut_for(head_dim):
    """Tiles of fewer rows than the kernel's, or more, and more workers than there are blocks."""
    case = deep_case(3, torch.bfloat16, 4, head_dim)
    exact, _ = dense(case)
    bound = 1.5 * torch_error(case, exact) + HALF_ULP[torch.bfloat16] * float(exact.abs().max())
    for tile_rows, blocks in ((64, 7), (128, 1000), (32, 264)):
        call = on_gpu(case, gpu_plan_of(case, SHARE_ALL, blocks, tile_rows))
        out, _ = torch.ops.prefixkit.tree_attention(*call.arguments())
        assert float((out.double() - exact).abs().max()) <= bound


def test_float32_runs_in_plain_torch_and_says_so_and_says_that_no_graph_takes_it(caplog):
    say_plain_torch.clear()
    case = deep_case(4, torch.float32, 8, 96)
    for _ in range(2):
        assert isinstance(planner_for(case.shape, GPU, torch.float32), TorchPlanner)
    out, lse = run(case, {}, 1)
    exact, exact_lse = dense(case)
    bound = 1.5 * torch_error(case, exact) + HALF_ULP[torch.float32] * float(exact.abs().max())
    assert float((out.double() - exact).abs().max()) <= bound
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    assert sum("plain torch: float32 has no kernel" in record.getMessage() for record in caplog.records) == 1
    call = on_gpu(case, planned(case, SHARE_ALL))
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(NotCapturable, match="run eagerly"):
        torch.ops.prefixkit.tree_attention(*call.arguments())
    # A plan in a captured step's tensors is refused before anything is captured.
    tensors = [tensor.to(GPU) for tensor in (*int_tensors(*gpu_plan_of(case, SHARE_ALL).arrays()), *node_tensors(case))]
    q, k, v, positions, _, scale, key, _ = call.arguments()
    with pytest.raises(NotCapturable, match=r"serve neither torch\.float32 nor .*; run eagerly"):
        torch.ops.prefixkit.tree_attention(q, k, v, positions, tensors, scale, key)
