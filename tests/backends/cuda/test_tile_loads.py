"""Loads of the tile path on Hopper, run on the CPU thread by thread: consumers find K and V of every token."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.queries import Queries
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.variants import CAUSAL, Variant, compose, sliding_window, variant
from prefixkit.backends.cuda.kernels import attention_unit, kernel_for
from prefixkit.ops.arguments import FP8
from prefixkit.testing.forests import Case, make_snapshot, random_parents, random_queries
from tests.attention.rotations import fresh_rng
from tests.backends.cuda.decode_emulation import HOLDING, attend, random_case
from tests.emulation.build import build

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


def built(folder: Path, dim: int, of: Variant = CAUSAL, e4m3: bool = False) -> Callable[[bytes, int, int], int]:
    """What runs both kinds of items: arguments, blocks, stages."""
    unit = attention_unit(kernel_for("sm_90a", dim, 4, e4m3=e4m3), dim, False, of)
    defines = [f"-D{name}={value}" for name, value in (*unit.defines, ("EMULATED_TILES", "1"))]
    library = build(folder, "decode", {"attention/plan.cuh": HOLDING}, unit.headers, *defines)
    for function in (library.tiles_on_cpu, library.decode_on_cpu):
        function.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]

    def both(given: bytes, blocks: int, stages: int) -> int:
        library.decode_on_cpu(given, blocks, stages)
        return int(library.tiles_on_cpu(given, blocks, stages))

    return both


def check(found: tuple[Tensor, ...], case: Case, of: Variant = CAUSAL) -> None:
    """Against float64, with tolerances for weights that are rounded to the dtype."""
    out, lse = found
    where = case.snapshot, case.row_node, case.positions.numpy()
    k, v = case.k_pages.bfloat16(), case.v_pages.bfloat16()
    exact = reference_attention(*where, case.q, k, v, case.scale, of)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(out, exact.out, rtol=1e-2, atol=2e-2, check_dtype=False)


def test_consumers_find_what_masks_show(tmp_path: Path) -> None:
    """Of items whose KV tiles are hidden, shown and compared in runs longer than a word of classes."""
    shown = variant(mask_mod=lambda b, h, q, kv: ((kv // 64 == 1) | (kv // 200 == 14) | (q - kv < 70)) & (kv <= q))
    both, rng = built(tmp_path, 64, shown), fresh_rng()
    for classes in (True, False):
        lengths = [int(rng.integers(2900, 3100)), *rng.integers(5, 100, 3).tolist()]
        snapshot, pages = make_snapshot(rng, [-1, 0, 1, 1], lengths, 16)
        queries = Queries(*(np.array(x, np.int32) for x in ([0, 1, 2, 3], [lengths[0] - 40, 0, 0, 0], lengths)))
        case = random_case(rng, snapshot, pages, queries, 4, 1, 64, spread=0.5)
        check(attend(both, case, stages=3, blocks=2, tiles=True, variant=shown, classes=classes), case, shown)


def test_segments_before_a_window_have_no_kv_tiles(tmp_path: Path) -> None:
    """Also where the window begins in the group of 16 in which the segment ends: classes of others stay theirs."""
    thirds = variant(mask_mod=lambda b, h, q, kv: (kv // 30 % 3 != 1) & (kv <= q))
    of = compose(thirds, sliding_window(45))
    both, rng = built(tmp_path, 64, of), fresh_rng()
    chains, nodes = 6, 8
    parents = [chain * nodes + at - 1 if at else -1 for chain in range(chains) for at in range(nodes)]
    last = np.arange(nodes - 1, chains * nodes, nodes, dtype=np.int32)
    for _ in range(12):  # each list is of the nodes of a chain, of one query each
        snapshot, pages = make_snapshot(rng, parents, rng.integers(3, 30, len(parents)).tolist(), 16)
        queries = Queries(last, snapshot.length[last] - 1, snapshot.length[last])
        case = random_case(rng, snapshot, pages, queries, 4, 1, 64, spread=0.5)
        found = attend(both, case, stages=3, blocks=2, tiles=True, variant=of, classes=True, trims=False)
        check(found, case, of)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("dim", "dtype", "launches"),
    [
        (64, FP8, ((16, 1),)),
        (80, FP8, ((3, 2),)),
        (128, FP8, ((16, 1), (3, 2))),
        (256, torch.bfloat16, ((16, 1), (3, 2))),
    ],
    ids=["64", "80", "128", "256"],
)
def test_consumers_find_what_pages_hold(
    dim: int, dtype: torch.dtype, launches: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    """Items of many rows over more KV tiles than are on their way at once; idle warps help to widen those of e4m3."""
    both, rng = built(tmp_path, dim, e4m3=dtype == FP8), fresh_rng()
    for page_size, blocks in launches:
        parents = random_parents(rng, int(rng.integers(3, 6)))
        lengths = [int(rng.integers(450, 600)), *rng.integers(5, 100, len(parents) - 1).tolist()]
        snapshot, pages = make_snapshot(rng, parents, lengths, page_size)
        case = random_case(rng, snapshot, pages, random_queries(rng, snapshot), 4, 1, dim, spread=0.5, dtype=dtype)
        check(attend(both, case, stages=2 + page_size % 3, blocks=blocks, tiles=True), case)
