"""Compiled layers apply the variants of their users, and those of one variant never run under another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.attention.variants import alibi, compose, soft_cap
from prefixkit.models import patch
from prefixkit.variants import streaming_llm
from tests.models.compile.decode import traced
from tests.models.variant_oracle import whole_pass

VARIANTS = compose(alibi([0.5, 0.25, 0.125, 0.0625]), soft_cap(1.5)), soft_cap(3.0)


def test_graphs_are_of_one_variant(dynamo, tiny, drive, rng):
    model = tiny()
    run = drive(model, variant=VARIANTS[0])
    heads = [rng.integers(3, 128, 12).tolist() for _ in VARIANTS]
    for variant, head in zip(VARIANTS, heads, strict=True):
        patch(run.model, variant=variant)
        run = drive(run.model, copied=False, variant=variant)
        runner = type(run.runner)(run.model, run.pool, True, traced)
        texts = [[*head, *rng.integers(3, 128, n).tolist()] for n in (3, 6)]
        sequences = [run.tree.insert(text) for text in texts]
        run.run()
        tokens = rng.permutation(np.arange(3, 128))[:2].tolist()
        run.tree.extend_each(sequences, tokens)
        step = run.step()
        logits = runner(step)
        assert runner.compiled.reason is None
        assert runner.compiled.graphs == 1, "one for all layers of the variant"
        for row, token in zip(logits, step.tokens.tolist(), strict=True):
            text = texts[tokens.index(token)]
            assert torch.allclose(row, whole_pass(model, [*text, token], variant)[-1], atol=1e-4)


def test_layers_of_other_variants_have_graphs_of_their_own(dynamo, tiny, drive, rng):
    variants = dict(enumerate(VARIANTS))
    run = drive(tiny(), variant=variants)
    sequence = run.tree.insert(rng.integers(3, 128, 12).tolist())
    other = run.tree.insert(rng.integers(3, 128, 12).tolist())
    run.run()
    runner = type(run.runner)(run.model, run.pool, True, traced)
    run.tree.extend_each([sequence, other], [5, 6])
    step = run.step()
    eager = run.runner(step)
    assert torch.allclose(runner(step), eager, atol=1e-5)
    assert runner.compiled.graphs == 2


@pytest.mark.parametrize("name", ["positions in the cache", "transforms", "documents"])
def test_layers_that_transform_rows_or_attend_twice_are_compiled_too(name, dynamo, tiny, drive, rng):
    gate = torch.linspace(0.5, 1.5, 24)
    variant = streaming_llm(2, 7)
    if name == "transforms":
        variant = prefixkit.variant(query=lambda x, positions: x * gate, output=lambda x, positions: x * gate.mean())
    if name == "documents":
        number = torch.arange(64) // 5
        variant = prefixkit.variant(mask_mod=lambda b, h, q, kv: (number[q] == number[kv]) & (kv <= q))
    run = drive(tiny(), variant=variant)
    sequences = [run.tree.insert(rng.integers(3, 128, 12).tolist()) for _ in range(2)]
    run.run()
    runner = type(run.runner)(run.model, run.pool, True, traced)
    for turn in range(2):
        run.tree.extend_each(sequences, [5 + turn, 9 - turn])
        step = run.step()
        eager, compiled = run.runner(step), runner(step)
        assert runner.compiled.reason is None and runner.compiled.graphs == 1
        assert torch.allclose(compiled, eager, atol=1e-5)
        run.tree.mark_computed([node for node, _, _ in run.runs], [end for _, _, end in run.runs])
