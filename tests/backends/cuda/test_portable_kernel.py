"""The portable kernel but for its merge, its own source run on the CPU thread by thread: against float64."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch

from prefixkit.attention.reference import reference_attention
from prefixkit.attention.variants import CAUSAL
from prefixkit.backends.cuda.kernels import attention_unit, kernel_for
from prefixkit.ops.arguments import FP8
from prefixkit.testing.forests import make_snapshot, random_parents, random_queries
from tests.attention.rotations import fresh_rng
from tests.backends.cuda.decode_emulation import HOLDING, attend, random_case
from tests.emulation.build import build

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

SHARED = "extern __shared__ __align__(1024) unsigned char base[];", "unsigned char* const base = memory;"


@pytest.mark.parametrize("dim", [48, 128])
def test_forests_of_pages_in_e4m3(dim: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tile items and decode items; NaN where no token is."""
    unit = attention_unit(kernel_for("sm_80", dim, 4, e4m3=True), dim, False, CAUSAL)
    defines = [f"-D{name}={value}" for name, value in (*unit.defines, ("EMULATED_PORTABLE", "1"))]
    instead = {"attention/plan.cuh": HOLDING, "attention/sm80/tree_attention.cu": SHARED}
    run = build(tmp_path_factory.mktemp("portable"), "decode", instead, unit.headers, *defines).portable_on_cpu
    run.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    rng = fresh_rng()
    for page_size, blocks in ((16, 2), (3, 4)):
        parents = random_parents(rng, int(rng.integers(3, 6)))
        lengths = [int(rng.integers(200, 300)), *rng.integers(5, 60, len(parents) - 1).tolist()]
        snapshot, pages = make_snapshot(rng, parents, lengths, page_size)
        case = random_case(rng, snapshot, pages, random_queries(rng, snapshot), 4, 1, dim, spread=1.0, dtype=FP8)
        out, lse = attend(run, case, stages=0, blocks=blocks, tiles=True, arch="sm_80")
        where = case.snapshot, case.row_node, case.positions.numpy()
        exact = reference_attention(*where, case.q, case.k_pages.bfloat16(), case.v_pages.bfloat16(), case.scale)
        torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=2e-2, check_dtype=False)
