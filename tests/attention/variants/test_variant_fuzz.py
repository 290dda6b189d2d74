"""Random compositions of traced functions over random trees and plain batches: the op against the oracle.

``PREFIXKIT_VARIANT_FORESTS=500 pytest tests/attention/variants/test_variant_fuzz.py`` takes half a minute; the
default is a sample of them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.variants import register
from prefixkit.backends.torch.tuning import CPU
from prefixkit.testing.forests import attend, program_of, random_case, random_plan, run_on
from prefixkit.testing.random_variants import fitting, random_variant
from tests.attention.torch_errors import Errors, Truth, check_forests

FORESTS = int(os.environ.get("PREFIXKIT_VARIANT_FORESTS", "120"))
SEQUENCES = 5
# As if forests were large: biases are made in each run, keys and rows are split.
SMALL = replace(CPU, call_us=1e-6, call_elements=1 << 10, score_elements=1 << 8, scored_rows=3, masked_rows=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_compositions_within_torchs_error(dtype: torch.dtype) -> None:
    """Rows that see nothing too: 0 and -inf, in one part or in all that are merged."""
    first = int(os.environ.get("PREFIXKIT_VARIANT_SEED", np.random.SeedSequence().generate_state(1)[0]))
    print("PREFIXKIT_VARIANT_SEED", first)
    hidden = list[Tensor]()

    def judge(errors: Errors, seed: int) -> None:
        rng = np.random.default_rng([seed, dtype.itemsize])
        case = random_case(rng, dtype, plain=seed % 2 == 1)
        of = random_variant(seed, seed + 1, SEQUENCES, case.q.shape[1])
        case = fitting(rng, case, of, SEQUENCES)
        truth = Truth.of(case, of)
        plan = random_plan(rng, case)
        run = attend(case, plan, register(of)) if seed % 3 else run_on(case, program_of(case, plan, of, SMALL), of)
        errors.add(seed, truth, *run)
        hidden.append((truth.dense.lse == -torch.inf).flatten())

    check_forests(judge, FORESTS // 2, first=first)
    further = iter(range(first + 100 * FORESTS, first + 110 * FORESTS))
    while not torch.cat(hidden).any():  # one run in some hundred has no such row among its forests
        check_forests(judge, 1, first=next(further))
    blind = torch.cat(hidden)
    assert blind.any() and not blind.all(), "some rows see nothing, most do not"
