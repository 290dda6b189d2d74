"""Random compositions of traced functions in the kernels, over random trees and plain batches, against the oracle.

``PREFIXKIT_GPU_CODES=12 PREFIXKIT_GPU_VALUES=40`` are the defaults: so many kernels are compiled, and each runs so many
variants, whose numbers and captured tensors differ, over a tree of its own; half of them with classes of KV tiles.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import StepTree
from prefixkit.attention.variants import Variant, register
from prefixkit.backends.cuda.variants.variant_header import header
from prefixkit.ops import backend
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, random_case
from prefixkit.testing.random_variants import fitting, random_variant
from tests.attention.torch_errors import Errors, Truth
from tests.gpu.cases import GPU, on_gpu, planned, poison

CODES, VALUES = (int(os.environ.get(f"PREFIXKIT_GPU_{name}", most)) for name, most in (("CODES", 12), ("VALUES", 40)))
FIRST_SEED = int(os.environ.get("PREFIXKIT_GPU_SEED", "0"))
SEQUENCES = 5
SHAPES = ((4, 2, 64), (8, 1, 128), (3, 3, 64), (14, 2, 64), (16, 1, 128))


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, and nothing else, run."""
    monkeypatch.setenv(backend.VARIABLE, "cuda")


@pytest.mark.parametrize("structure", range(FIRST_SEED, FIRST_SEED + CODES))
def test_one_code_with_many_values_is_within_torchs_error(structure: int) -> None:
    """Rows that see nothing too: 0 and -inf, in one part or in all that are merged."""
    draw = np.random.default_rng(structure)
    heads, dtype = SHAPES[draw.integers(len(SHAPES))], (torch.bfloat16, torch.float16)[draw.integers(2)]
    errors, headers = Errors(), set[str | None]()
    for seed in range(structure * VALUES, (structure + 1) * VALUES):
        rng, of = np.random.default_rng(seed), random_variant(structure, seed, SEQUENCES, heads[0])
        headers.add(header(of))
        check(errors, seed, rng, of, heads, dtype)
    assert len(headers) == 1, "one kernel for all"
    errors.check(only_out=True)


def check(
    errors: Errors,
    seed: int,
    rng: np.random.Generator,
    of: Variant,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    case = fitting(rng, random_case(rng, dtype, heads, plain=seed % 2 == 1), of, SEQUENCES)
    truth = Truth.of(case, of)
    call, key = on_gpu(case, planned(case, SHARE_NONE if seed % 3 == 0 else SHARE_ALL)), register(of)
    given = list(call.arguments(key))
    given[4] = plan = [*call.plan, torch.from_numpy(StepTree(case.snapshot, case.queries).sequences).to(GPU)]
    if seed % 2:
        shape = [*heads, heads[2]]
        plan.append(torch.ops.prefixkit.classify_blocks(call.q_positions, plan, shape, case.k_pages.shape[1], key))
    poison(1 << 20)
    out, lse = (result.cpu() for result in torch.ops.prefixkit.tree_attention(*given))
    errors.add(seed, truth, out, lse)
    torch.testing.assert_close(lse.double(), truth.dense.lse, rtol=1e-5, atol=1e-4, msg=lambda text: f"{seed}: {text}")
