"""Functions of whole rows: they run once for each row, where it is made, and the oracle runs the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit.attention.reference import Exact, reference_attention
from prefixkit.attention.variants import BadTransform, BadVariant, Variant, alibi, compose, parts_of, sliding_window
from tests.functional.own_model import DIM, HEADS, KV_HEADS, VOCAB, Errors, pool_of, torch_attention

DTYPES = (torch.float32, torch.bfloat16)
GATE = torch.rand(KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))
OUT_GATE = torch.rand(HEADS, 1, generator=torch.Generator().manual_seed(1))
WEIGHT = 0.5 + torch.rand(DIM, generator=torch.Generator().manual_seed(2))


def rms_norm(x: Tensor, positions: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * WEIGHT.to(x)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of the op's user."""
    angle = positions[:, None] * 100.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float64, device=x.device) / DIM)
    cos, sin = (of.to(x.dtype)[:, None] for of in (angle.cos(), angle.sin()))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def gate_values(x: Tensor, positions: Tensor) -> Tensor:
    return x * GATE.to(x)


def gate_outputs(x: Tensor, positions: Tensor) -> Tensor:
    return x * OUT_GATE.to(x) / (1 + positions[:, None, None])


VARIANTS: dict[str, Variant] = {
    "query and key norm": prefixkit.variant(query=rms_norm, key=rms_norm),
    "rotary": prefixkit.variant(query=rotate, key=rotate),
    "gates": prefixkit.variant(value=gate_values, output=gate_outputs),
    "all": compose(
        prefixkit.variant(query=rms_norm, key=rms_norm, value=gate_values),
        sliding_window(9),
        prefixkit.variant(query=rotate, key=rotate, output=gate_outputs),
        alibi([0.1] * HEADS),
    ),
}


def run(variant: Variant, dtype: torch.dtype, seed: int) -> tuple[Any, list[Tensor], Exact]:
    """A step over prompts, one of decoding behind it: what came of the second, its numbers, and the exact result."""
    rng = np.random.default_rng(seed)
    plain, pool = pool_of(dtype, 4), pool_of(dtype, 4)
    raw = prefixkit.TreeAttention(plain, HEADS)
    attention = prefixkit.TreeAttention(pool, HEADS, variant)
    shared = rng.integers(0, VOCAB, 30)
    prompts = [np.append(shared, rng.integers(0, VOCAB, rng.integers(1, 9))) for _ in range(3)]
    tree, samples = prefixkit.tree_from_tokens(pool, prompts)

    def numbers(rows: int, heads: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal((rows, heads, DIM), dtype=np.float32)).to(dtype)

    for turn in range(2):
        step = prefixkit.plan(attention, tree, samples)
        kv = [numbers(step.num_rows, KV_HEADS) for _ in "kv"]
        for each in (step, prefixkit.plan(raw, tree, samples)):
            prefixkit.append(each, 0, *kv)
        q = numbers(step.num_rows, HEADS)
        out, lse = prefixkit.attend(step, 0, q)
        if not turn:
            prefixkit.commit(step)
            tree.extend_each(samples, rng.integers(0, VOCAB, len(samples)))
    batch = step.step.plans[0].tree
    where = batch.snapshot, batch.queries.row_node(), batch.positions
    exact = reference_attention(*where, q, *plain.pages(0), DIM**-0.5, variant)
    return (out, lse), [q, *kv], exact


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_those_of_the_oracle_that_transforms_all_keys_for_each_query(name: str) -> None:
    for seed in range(3):
        print("seed", seed)
        (out, lse), _, exact = run(VARIANTS[name], torch.float32, seed)
        torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=3e-6)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-5)


def test_in_bfloat16_a_transform_errs_by_what_its_own_rounding_does() -> None:
    """Torch's own attention, over rows that the function has transformed in the same dtype, is the measure."""
    errors, variant, at = Errors(), VARIANTS["rotary"], torch.arange(40)

    def seen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last query, and the keys and values of each of its heads."""
        keys, values = (of.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for of in (rotate(k, at), v))
        return rotate(q, at)[-1], keys, values

    for seed in range(8):
        print("seed", seed)
        pool, rng = pool_of(torch.bfloat16, 4), np.random.default_rng(seed)
        attention = prefixkit.TreeAttention(pool, HEADS, variant)
        tree, (one,) = prefixkit.tree_from_tokens(pool, [rng.integers(0, VOCAB, 40)])
        step = prefixkit.plan(attention, tree, [one])
        q, k, v = (torch.from_numpy(rng.standard_normal((40, n, DIM))).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
        prefixkit.append(step, 0, k, v)
        out, lse = prefixkit.attend(step, 0, q)
        asked, keys, values = seen(q.double(), k.double(), v.double())
        score = torch.einsum("hd,hnd->hn", asked, keys) / DIM**0.5
        exact = torch.einsum("hn,hnd->hd", score.softmax(-1), values), score.logsumexp(-1)
        errors.add_numbers((out[-1], lse[-1]), exact, torch_attention(*seen(q, k, v)))
    errors.check(lse=0.02)  # scores of queries and keys that are rounded once more


def test_keys_and_values_are_transformed_once_and_queries_in_each_step() -> None:
    seen: dict[str, Counter[int]] = {name: Counter() for name in ("query", "key", "value", "output")}

    def note(name: str) -> Any:
        def transform(x: Tensor, positions: Tensor) -> Tensor:
            assert x.ndim == 3 and positions.dtype == torch.int64 and positions.shape == x.shape[:1]
            seen[name].update(positions.tolist())
            return x

        return transform

    pool = pool_of(torch.float32, 4)
    attention = prefixkit.TreeAttention(pool, HEADS, prefixkit.variant(**{name: note(name) for name in seen}))
    tree, prompts = prefixkit.tree_from_tokens(pool, [[1, 2, 3, 4, 5], [1, 2, 3, 6]])
    for token in range(3):
        step = prefixkit.plan(attention, tree, prompts)
        prefixkit.append(step, 0, *torch.randn(2, step.num_rows, KV_HEADS, DIM))
        prefixkit.attend(step, 0, torch.randn(step.num_rows, HEADS, DIM))
        prefixkit.commit(step)
        tree.extend_each(prompts, [token, token + 1])
    rows = Counter({0: 1, 1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 1})  # 0 to 2 are shared; then 5 and 4 tokens, and two more
    assert all(found == rows for found in seen.values()), seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": 3}, "query transform must be a function, got int 3"),
        ({"key": lambda x: x}, r"key transform '<lambda>' must take 2 arguments, \(x, positions\)"),
    ],
)
def test_functions_of_other_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadVariant, match=message):
        prefixkit.variant(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"query": lambda x, positions: x[:, :1]},
            r"the query transform .* \[2, 4, 64\] .* returned \[2, 1, 64\] on cpu",
        ),
        ({"key": lambda x, positions: None}, r"the key transform .* \[2, 2, 64\] .* returned NoneType"),
        ({"value": lambda x, positions: x.to("meta")}, r"the value transform .* on cpu, but it returned .* on meta"),
        ({"output": lambda x, positions: x.flatten(1)}, r"the output transform .* returned \[2, 256\] on cpu"),
    ],
)
def test_results_of_another_shape_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    pool = pool_of(torch.float32, 4)
    attention = prefixkit.TreeAttention(pool, HEADS, prefixkit.variant(**arguments))
    tree, prompts = prefixkit.tree_from_tokens(pool, [[1, 2]])
    step = prefixkit.plan(attention, tree, prompts)
    with pytest.raises(BadTransform, match=message):
        prefixkit.append(step, 0, *torch.randn(2, 2, KV_HEADS, DIM))
        prefixkit.attend(step, 0, torch.randn(2, HEADS, DIM))
    if "query" in arguments or "output" in arguments:
        return
    assert all(bool(pages.isnan().all()) for pages in pool.pages(0)), "nothing was written"


def test_what_they_do_is_part_of_a_variants_content_and_parts() -> None:
    gate = torch.ones(4)
    first, second = (prefixkit.variant(value=lambda x, positions: x * gate) for _ in range(2))
    assert first.content() == second.content() and parts_of(first)[1:] == parts_of(second)[1:]
    plain = prefixkit.variant(value=lambda x, positions: x)
    assert plain.content() != first.content()
    assert prefixkit.variant(key=lambda x, positions: x).content() != plain.content(), "which rows they are of"
    before = first.content()
    gate[0] = 2
    assert first.content() != before
