"""Steps of a model of one's own: dense attention in effect, planned anew only where the tree's structure changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit.attention.queries import UnnumberedSequences
from prefixkit.attention.reference import reference_attention, visible_tokens
from prefixkit.attention.variants import Variant, attention_sinks, sliding_window
from tests.functional.own_model import DIM, HEADS, KV_HEADS, VOCAB, Errors, OwnModel, pool_of, torch_attention
from tests.op_calls import Calls

DTYPES = (torch.float32, torch.bfloat16)
PADS = (0, 0, 0, 1), (0, 0, 0, 1), (0, 1)  # one more token


def random_tokens(rng: np.random.Generator, longest: int) -> np.ndarray:
    """Few token ids, so that sequences share by chance too."""
    return rng.integers(0, VOCAB, rng.integers(1, longest))


def set_up(
    rng: np.random.Generator, dtype: torch.dtype, page_size: int, device: str = "cpu"
) -> tuple[Any, list[Any], OwnModel]:
    """Prompts that share a prefix, samples of each, and the model."""
    pool, prefix = pool_of(dtype, page_size, device=device), random_tokens(rng, 40)
    tree, prompts = prefixkit.tree_from_tokens(pool, [np.append(prefix, random_tokens(rng, 12)) for _ in range(4)])
    samples = [sample for prompt in prompts for sample in tree.fork(prompt, int(rng.integers(1, 4)))]
    return tree, samples, OwnModel(prefixkit.TreeAttention(pool, HEADS), rng)


@pytest.mark.parametrize(("dtype", "page_size"), zip([*DTYPES, torch.float8_e4m3fn], (1, 3, 16), strict=True), ids=str)
def test_samples_that_grow_fork_and_end_attend_as_dense_attention_does(dtype: torch.dtype, page_size: int) -> None:
    errors = Errors()
    for seed in range(2):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        tree, samples, model = set_up(rng, dtype, page_size)
        for turn in range(12):
            step = prefixkit.plan(model.attention, tree, samples)
            found = model.run(step, samples)
            prefixkit.commit(step)
            for sample, *rows in zip(samples, *found, strict=True):
                errors.add(model, sample.tokens(), *rows)
            if turn % 3 == 2:
                samples += tree.fork(samples[int(rng.integers(len(samples)))], 2)
                tree.release(samples.pop(int(rng.integers(len(samples)))))
                samples.append(tree.insert(random_tokens(rng, 30)))
            tree.extend_each(samples, rng.integers(0, VOCAB, len(samples)))
    errors.check()


@pytest.mark.parametrize("variant", [sliding_window(7), attention_sinks()], ids=lambda variant: variant.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_of_a_step_is_that_of_the_reference_under_a_variant(dtype: torch.dtype, variant: Variant) -> None:
    """With a scale of one's own; inner nodes have rows too."""
    errors = Errors()
    for seed in range(4):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        tree, samples, model = set_up(rng, dtype, 4)
        attention = prefixkit.TreeAttention(model.attention.pool, HEADS, variant, scale=0.3)
        step = prefixkit.plan(attention, tree, samples)
        q, sinks = model.random(step.num_rows, HEADS), model.random(1, HEADS)[0, :, 0].contiguous()
        prefixkit.append(step, 0, *(model.random(step.num_rows, KV_HEADS) for _ in "kv"))
        given = sinks if variant.has_sinks else None
        ours = prefixkit.attend(step, 0, q, given)
        batch, pages = step.step.plans[0].tree, attention.pool.pages(0)
        where = batch.queries.row_node(), batch.positions
        exact = reference_attention(batch.snapshot, *where, q, *pages, 0.3, variant, given)
        for row, (node, position) in enumerate(zip(*where, strict=True)):
            slots, positions = map(torch.from_numpy, visible_tokens(batch.snapshot, int(node), int(position)))
            k, v = (of.flatten(0, 1)[slots].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for of in pages)
            bias = torch.zeros(HEADS, 1, len(slots))
            if given is None:
                bias[..., position - positions >= 7] = -math.inf
            else:  # a key of zeros without a value, whose score is the sink
                k, v, bias = (torch.nn.functional.pad(of, pad) for of, pad in zip((k, v, bias), PADS, strict=True))
                bias[..., -1] = sinks.float()[:, None]
            theirs = torch_attention(q[row], k, v, bias.to(dtype), scale=0.3)
            errors.add_numbers((ours[0][row], ours[1][row]), (exact.out[row], exact.lse[row]), theirs)
    errors.check()


@pytest.mark.parametrize("traced", [True, False])
def test_functions_see_the_index_of_their_sequence_as_b(traced: bool) -> None:
    """Whatever the tree's order is; tokens that several sequences share have no such number."""
    rng = np.random.default_rng(3)
    tree, samples, model = set_up(rng, torch.float32, 4)
    slope = torch.from_numpy(rng.random(len(samples)).astype(np.float32))
    variant = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score + slope[b] * (kv_idx - q_idx), traced=traced)
    attention = prefixkit.TreeAttention(model.attention.pool, HEADS, variant)
    with pytest.raises(UnnumberedSequences, match=r"plan: variant .* reads b, .* but sequences \d and \d share tokens"):
        prefixkit.plan(attention, tree, samples)
    prompts = prefixkit.plan(model.attention, tree, samples)
    model.run(prompts, samples)
    prefixkit.commit(prompts)
    tree.extend_each(samples, rng.integers(0, VOCAB, len(samples)))
    samples = [samples[at] for at in rng.permutation(len(samples))]
    for _ in range(2):  # the second time of the plan at hand, for sequences in another order
        samples = samples[::-1]
        step = prefixkit.plan(attention, tree, samples)
        q, *kv = (model.random(step.num_rows, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        prefixkit.append(step, 0, *kv)
        out, lse = prefixkit.attend(step, 0, q)
        batch = step.step.plans[0].tree
        numbers = np.empty(len(samples), np.int64)
        numbers[step.last_rows.numpy()] = np.arange(len(samples))
        where, pages = (batch.queries.row_node(), batch.positions), attention.pool.pages(0)
        exact = reference_attention(batch.snapshot, *where, q, *pages, DIM**-0.5, variant, sequences=numbers)
        torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=2e-6)
    assert attention.planner.plans_made == 1


def test_a_step_runs_what_has_no_kv_and_names_the_rows_of_its_sequences() -> None:
    pool = pool_of(torch.float32, 4)
    tree, (first, second) = prefixkit.tree_from_tokens(pool, [[1, 2, 3, 4, 5], [1, 2, 3, 6]])
    attention = prefixkit.TreeAttention(pool, HEADS)
    step = prefixkit.plan(attention, tree, [second, first])
    assert step.tokens.tolist() == [1, 2, 3, 4, 5, 6]  # the shared ones once, in depth-first order
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert step.last_rows.tolist() == [5, 4]  # in the order given
    assert step.slots.tolist() == [*first.slots().tolist(), int(second.slots()[-1])]
    alone = prefixkit.plan(attention, tree, [second])
    assert alone.tokens.tolist() == [1, 2, 3, 6], "tokens of others wait"
    prefixkit.commit(alone)
    assert prefixkit.plan(attention, tree, [first, second]).tokens.tolist() == [4, 5, 6], "the last token always runs"


def test_a_step_that_was_not_committed_runs_again() -> None:
    pool = pool_of(torch.float32, 4)
    tree, samples = prefixkit.tree_from_tokens(pool, [[1, 2, 3]])
    attention = prefixkit.TreeAttention(pool, HEADS)
    assert prefixkit.plan(attention, tree, samples).num_rows == prefixkit.plan(attention, tree, samples).num_rows == 3


def test_tokens_with_kv_run_again_where_asked_and_their_kv_stays() -> None:
    errors = Errors()
    for seed in range(40):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        tree, samples, model = set_up(rng, torch.float32, (1, 4)[seed % 2])
        step = prefixkit.plan(model.attention, tree, samples)
        model.run(step, samples)
        prefixkit.commit(step)
        before = [pages.clone() for pages in model.attention.pool.pages(0)]
        wanted = [int(rng.integers(1, sample.length + 1)) for sample in samples]
        step = prefixkit.plan(model.attention, tree, samples, num_queries=wanted)
        rows = set(zip(step.step.plans[0].tree.queries.row_node().tolist(), step.positions.tolist(), strict=True))
        expected = set()
        for sample, count in zip(samples, wanted, strict=True):
            node_of = [node.index for node in list(sample.path())[-2::-1] for _ in range(node.length)]
            expected |= {(node_of[at], at) for at in range(sample.length - count, sample.length)}
        assert rows == expected
        for sample, last, *found in zip(samples, step.last_rows, *model.run(step, samples), strict=True):
            errors.add(model, sample.tokens(), *found)
            assert step.tokens[last] == sample.node.last_token
        assert (step.slots == -1).all()
        for pages, old in zip(model.attention.pool.pages(0), before, strict=True):
            assert torch.equal(pages.nan_to_num(), old.nan_to_num())
    errors.check()


def test_nothing_is_planned_anew_while_leaves_only_grow() -> None:
    rng = np.random.default_rng(1)
    tree, samples, model = set_up(rng, torch.float32, 4)
    plans = model.attention.planner

    def steps(count: int) -> int:
        before = plans.plans_made
        for _ in range(count):
            prefixkit.commit(prefixkit.plan(model.attention, tree, samples))
            tree.extend_each(samples, rng.integers(0, VOCAB, len(samples)))
        return plans.plans_made - before

    tree.extend_each(samples, rng.integers(0, VOCAB, len(samples)))
    assert steps(9) == 2  # one with the prompts' tokens, one over the leaves
    samples += tree.fork(samples[0])
    assert steps(9) == 1
    tree.release(samples.pop())
    assert steps(9) == 1


def test_merging_attention_over_parts_of_the_keys_is_attention_over_all() -> None:
    """Of 16 bits too: both parts are rounded once, and their mean once more.  A part may hide everything."""
    for seed in range(8):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        score = torch.from_numpy(3 * rng.standard_normal((5, HEADS, 40)))
        value, cut = torch.from_numpy(rng.standard_normal((40, 8))), int(rng.integers(1, 39))

        def state(part: slice, score: Tensor = score, value: Tensor = value) -> tuple[Tensor, Tensor]:
            return score[..., part].softmax(-1) @ value[part], score[..., part].logsumexp(-1)

        (out_a, lse_a), (out_b, lse_b), (exact, exact_lse) = map(state, (slice(cut), slice(cut, 40), slice(40)))
        out_a[0], lse_a[0], lse_a[1], out_a[1], lse_b[1], out_b[1] = 0, -math.inf, -math.inf, 0, -math.inf, 0
        exact[0], exact_lse[0], exact[1], exact_lse[1] = out_b[0], lse_b[0], 0, -math.inf
        out, lse = prefixkit.merge(out_a.to(dtype), lse_a.float(), out_b.to(dtype), lse_b.float())
        assert out.dtype == dtype and lse.dtype == torch.float32
        # Rounding of the parts moves the mean by no more than the larger part's own.
        most = 1.01 * torch.finfo(dtype).eps * float(torch.stack((out_a, out_b)).abs().max())
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=most + 1e-6)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_of_the_ops_that_public_steps_call(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    tree, samples, model = set_up(rng, dtype, 4)
    step = prefixkit.plan(model.attention, tree, samples)
    q, key, value = (model.random(step.num_rows, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    pages, attention = model.attention.pool.pages(0), model.attention
    for of in pages:
        of.zero_()  # opcheck compares what an op has written, and NaN is unequal
    torch.library.opcheck(torch.ops.prefixkit.kv_append.default, (key, value, *pages, step.slots))
    prefixkit.append(step, 0, key, value)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = q, *pages, step.positions, step.step.plan, DIM**-0.5, attention.keys[0]
    torch.library.opcheck(torch.ops.prefixkit.tree_attention.default, arguments, test_utils=checks)
    for mine, ops in zip(prefixkit.attend(step, 0, q), torch.ops.prefixkit.tree_attention(*arguments), strict=True):
        assert torch.equal(mine, ops)


@pytest.mark.parametrize(("name", "decode"), [("documents", 1), ("window", 0)])
def test_blocks_are_classified_where_positions_do_not_decide_what_is_hidden(name: str, decode: int) -> None:
    """Once for all layers, when a step is planned: in prompts under any mask."""
    number = torch.arange(64) // 5
    documents = prefixkit.variant(mask_mod=lambda b, h, q, kv: (number[q] == number[kv]) & (kv <= q))
    pool = pool_of(torch.float32, 4)
    attention = prefixkit.TreeAttention(pool, HEADS, documents if name == "documents" else sliding_window(7))
    tree, sequences = prefixkit.tree_from_tokens(pool, [[1, 2, 3, 4, 5], [1, 2, 3, 9]])
    for expected in (1, decode):
        with Calls(torch.ops.prefixkit.classify_blocks.default) as calls:
            step = prefixkit.plan(attention, tree, sequences)
        assert calls.times == expected
        prefixkit.commit(step)
        tree.extend_each(sequences, [7, 8])


def test_a_step_that_is_committed_late_takes_no_kv_from_a_later_one() -> None:
    pool = pool_of(torch.float32, 4)
    attention = prefixkit.TreeAttention(pool, HEADS)
    tree, (sequence,) = prefixkit.tree_from_tokens(pool, [[1, 2, 3]])
    prefixkit.commit(prefixkit.plan(attention, tree, [sequence]))
    steps = []
    for token in (4, 5):
        tree.extend_each([sequence], [token])
        steps.append(prefixkit.plan(attention, tree, [sequence]))
    for step in reversed(steps):
        prefixkit.commit(step)
        assert tree.snapshot().computed.tolist() == [5]
