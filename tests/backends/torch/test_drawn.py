"""How tokens were drawn, by torch: bit by bit what the specification says, whatever the parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.backends.torch.drawn import write_drawn
from prefixkit.ops.sampling_records import mask, records
from prefixkit.sampling.rng import uniforms
from prefixkit.sampling.specification import BrokenLogits, sample_tokens
from prefixkit.testing.sampling_cases import random_params, rows_of
from tests.grammars import Residues

ROWS = 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 33, 1000])
def test_it_is_that_of_the_specification(vocab, dtype):
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    logits, params = rows_of(rng, ROWS, vocab, dtype), random_params(rng, ROWS, vocab)
    keys, steps = rng.integers(0, 2**64, ROWS, dtype=np.uint64), rng.integers(0, 2**20, ROWS)
    histories = [rng.integers(0, vocab, rng.integers(1, 30)) for _ in range(ROWS)]
    grammars = [None if row % 3 else Residues(1) for row in range(ROWS)]
    params = [replace(own, grammar=grammar) for own, grammar in zip(params, grammars, strict=True)]
    few = [np.append(rng.integers(0, vocab, 9), int(logits[row].argmax())) for row in range(ROWS)]
    allowed = [None if grammar is None else may for grammar, may in zip(grammars, few, strict=True)]
    expected = np.zeros((ROWS, 2), np.float32)
    tokens, _ = sample_tokens(logits.float(), params, uniforms(keys, steps), histories, expected, allowed)
    seen, bits = (torch.from_numpy(np.stack([mask(one, vocab) for one in each])) for each in (histories, few))
    drawn = torch.zeros(ROWS, 2)
    write_drawn(logits, torch.from_numpy(records(params, keys, steps)), seen, tokens, drawn, bits, elements=7 * vocab)
    np.testing.assert_array_max_ulp(drawn.numpy()[:, 0] - 1, expected[:, 0] - 1, 2)  # logarithms differ by library
    assert np.array_equal(drawn.numpy()[:, 1], expected[:, 1])


def test_rows_without_a_token_have_none_and_those_at_rest_keep_theirs():
    logits, params = torch.randn(3, 20), random_params(np.random.default_rng(0), 3, 20)
    logits[1] = torch.nan
    with pytest.raises(BrokenLogits):
        sample_tokens(logits, params, np.zeros(3), [np.zeros(1, np.int64)] * 3)
    table = torch.from_numpy(records(params, np.zeros(3, np.uint64), np.zeros(3, np.int64)))
    table[2, 10] = 0  # not active
    drawn = torch.full((3, 2), 7.0)
    write_drawn(logits, table, torch.zeros(3, 1, dtype=torch.int32), torch.tensor([0, -1, 5]), drawn)
    assert drawn[1].isnan().all() and (drawn[2] == 7).all() and (drawn[0] != 7).all()
