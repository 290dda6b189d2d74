"""``latent_attention``, and ``tree_attention`` over K of 192 and V of 128, on the GPU: forests against float64."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.gpu_cost import H200, H200_LATENT, tiles_only
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.backends.cuda.device_planner import over_tree
from prefixkit.backends.cuda.kernels import latent_groups
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    Case,
    fill,
    int_tensors,
    make_snapshot,
    node_tensors,
    random_case,
)
from tests.gpu.cases import GPU, head_major, poison
from tests.gpu.oracle import Errors, dense
from tests.models.states.hybrids import VOCAB

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="kernels for Hopper"
)
# Rounding of the output that torch's error may happen to lack in a small case.
HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
SIZES = ((512, 64), (256, 32), (256, 64))
DTYPES = [torch.bfloat16, torch.float16]


def over_latents(case: Case, latent: int) -> Case:
    """The case with values that are the beginning of its keys."""
    return replace(case, v_pages=case.k_pages[..., :latent])


def step_of(case: Case, shape: HeadShape, cost, share, num_sms: int) -> StepPlan:
    """A plan for so many multiprocessors, as the device's planner makes it."""
    tree = StepTree(case.snapshot, case.queries)
    plan = make_gpu_plan([decompose(tree, shape, share)], tree.length, case.queries.num_rows, shape, num_sms, cost)
    work, nodes = ([t.to(GPU) for t in part] for part in (int_tensors(*plan.arrays()), node_tensors(case)))
    return over_tree(StepPlan(work, tree, lambda: plan), nodes, tree)


def attend_latents(case: Case, latent: int, share, num_sms: int = 132) -> tuple[Tensor, Tensor]:
    heads, width = case.q.shape[1:]
    groups = latent_groups(heads)
    assert groups is not None
    shape = HeadShape(heads, groups, width, 2, latent)
    step = step_of(case, shape, H200_LATENT, share, num_sms)
    c, r = (head_major(part) for part in (case.k_pages[..., :latent], case.k_pages[..., latent:]))
    arguments = case.q.to(GPU), c, r, case.positions.to(GPU), step.tensors, case.scale
    poison(1 << 20)
    out, lse = torch.ops.prefixkit.latent_attention(*arguments)
    again, _ = torch.ops.prefixkit.latent_attention(*arguments)
    assert torch.equal(out, again), "two runs differ"
    return out, lse


def attend_apart(case: Case, share, num_sms: int = 132) -> tuple[Tensor, Tensor]:
    step = step_of(case, case.shape, tiles_only(H200), share, num_sms)
    k, v = head_major(case.k_pages), head_major(case.v_pages)
    arguments = case.q.to(GPU), k, v, case.positions.to(GPU), step.tensors, case.scale, "causal", None
    poison(1 << 20)
    out, lse = torch.ops.prefixkit.tree_attention(*arguments)
    again, _ = torch.ops.prefixkit.tree_attention(*arguments)
    assert torch.equal(out, again), "two runs differ"
    return out, lse


def check(errors: Errors, seed: int, case: Case, out: Tensor, lse: Tensor) -> None:
    exact, exact_lse = dense(case)
    plain, _ = dense(case, dtype=case.q.dtype)
    theirs = max(float((plain.double() - exact).abs().max()), HALF_ULP[case.q.dtype] * float(exact.abs().max()))
    errors.add(seed, case, float((out.double() - exact).abs().max()), theirs)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents_of_small_forests_err_no_more_than_torch(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    errors, (latent, rotary) = Errors(), sizes
    for seed in range(24):
        rng = np.random.default_rng(seed)
        heads = int(rng.choice([1, 3, 16, 20, 40, 64, 128]))
        case = over_latents(random_case(rng, dtype, (heads, 1, latent + rotary)), latent)
        share, sms = (SHARE_ALL, SHARE_NONE)[seed % 2], (132, 5, 1000)[seed % 3]
        check(errors, seed, case, *attend_latents(case, latent, share, sms))
    errors.check()


def long_case(rng: np.random.Generator, dtype, heads: tuple[int, int, int], page_size: int, v_dim: int) -> Case:
    """A prompt under way, and rows below two shared nodes of many KV tiles."""
    rows = int(rng.integers(2, 20))
    lengths = [int(rng.integers(300, 900)), int(rng.integers(65, 200)), *rng.integers(1, 150, rows).tolist(), 90]
    snapshot, num_pages = make_snapshot(rng, [-1, 0, *[1] * rows, -1], lengths, page_size)
    last = np.arange(2, rows + 3, dtype=np.int32)
    count = np.array([*[1] * rows, 70], dtype=np.int32)
    queries = Queries(last, snapshot.length[last] - count, snapshot.length[last])
    return fill(rng, snapshot, num_pages, queries, heads, dtype, float(rng.choice([0.3, 1.0, 4.0])), v_dim)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents_of_long_nodes_err_no_more_than_torch(dtype: torch.dtype, page_size: int) -> None:
    errors = Errors()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        heads = (16, 40, 128)[seed % 3]
        case = over_latents(long_case(rng, dtype, (heads, 1, 576), page_size, 576), 512)
        check(errors, seed, case, *attend_latents(case, 512, (SHARE_ALL, SHARE_NONE)[seed % 2], (132, 7)[seed // 3]))
    errors.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_narrower_than_keys_err_no_more_than_torch(dtype: torch.dtype) -> None:
    errors = Errors()
    for seed in range(32):
        rng = np.random.default_rng(seed)
        kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 4, 7, 16]))
        heads = kv_heads * group, kv_heads, 192
        if seed % 2:
            case = random_case(rng, dtype, heads, 128)
        else:
            case = long_case(rng, dtype, heads, int(rng.choice([1, 16, 48, 64])), 128)
        check(errors, seed, case, *attend_apart(case, (SHARE_ALL, SHARE_NONE)[seed // 2 % 2], (132, 5)[seed % 2]))
    errors.check()


@pytest.fixture(scope="module")
def exact() -> Any:
    """A float32 model of DeepSeek-V3's heads, whose weights are numbers of bfloat16."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=None,
        max_position_embeddings=4096,
        rope_scaling=None,
    )
    return DeepseekV3ForCausalLM(config).eval().to("cuda", torch.bfloat16).float()


def errors_of(model: Any, exact: Any, prompts: list[list[int]], samples: list[Any]) -> tuple[float, float]:
    """Mean errors of the samples' log-probabilities, and of the unpatched model's by one forward pass, which judge."""
    ours, theirs = list[Tensor](), list[Tensor]()
    prefixkit.unpatch(model)
    for one in samples:
        text, start = [*prompts[one.prompt_index], *one.tokens], len(prompts[one.prompt_index])
        ids, tokens = torch.tensor([text], device="cuda"), torch.tensor(one.tokens, device="cuda")[:, None]
        with torch.inference_mode():
            right, plain = (
                each(ids).logits[0, start - 1 : -1].float().log_softmax(-1).gather(1, tokens)[:, 0]
                for each in (exact, model)
            )
        ours.append((torch.tensor(one.logprobs, device="cuda") - right).abs())
        theirs.append((plain - right).abs())
    prefixkit.patch(model)
    for one, error in sorted(zip(samples, ours, strict=True), key=lambda pair: -float(pair[1].mean()))[:5]:
        print("prompt", one.prompt_index, "sample", one.index, "errors", [round(each, 4) for each in error.tolist()])
    return tuple(float(torch.cat(of).mean()) for of in (ours, theirs))  # type: ignore[return-value]


def test_samples_of_a_long_prompt_have_the_probabilities_of_one_forward_pass(
    exact: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """K and V of a prompt with many samples are made and kept; of a short one they are not."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rng = np.random.default_rng(seed)
    model = prefixkit.patch(copy.deepcopy(exact).to(torch.bfloat16))
    prompts = [rng.integers(3, VOCAB, 1100).tolist(), rng.integers(3, VOCAB, 30).tolist()]
    caplog.set_level(logging.INFO, logger="prefixkit")
    for n, new in ((128, 24), (3, 24), (128, 3)):  # few steps run without graphs
        with prefixkit.Session(model) as session:
            params = prefixkit.SamplingParams(n=n, max_new_tokens=new, seed=n, stop_token_ids=(5, 9))
            caplog.clear()
            found = [*session.generate(prompts, params)]
            assert ("are kept" in caplog.text) == (n == 128 and new > 3)
            assert (session.report.graph_steps > 0) == (new > 3)
            ours, theirs = errors_of(model, exact, prompts, found[:: 13 if n > 13 else 1])
            assert ours <= 1e-4 + 1.5 * theirs, (n, new, ours, theirs)
            # Later calls go on from samples of this one, some from the middle of theirs.
            longer = [prompts[one.prompt_index] + list(one.tokens) for one in found][::25]
            longer = [text[: len(text) - 3 * (i % 2)] for i, text in enumerate(longer)]
            again = [*session.generate(longer, params)]
            ours, theirs = errors_of(model, exact, longer, again[::41])
            assert ours <= 1e-4 + 1.5 * theirs, (n, new, ours, theirs)
    prefixkit.unpatch(model)


def occupy(tokens: int) -> None:
    """Fill small blocks of memory that torch's allocator holds free, and free them again."""
    blocks = [torch.full((128 * size,), -1, dtype=torch.int32, device=GPU) for size in range(1, 17) for _ in range(32)]
    del blocks


def test_what_graphs_read_is_not_given_to_other_tensors(exact: Any) -> None:
    """Between steps others take the memory that is free: no graph, which holds only addresses, may read it."""
    rng = np.random.default_rng(0)
    model = prefixkit.patch(copy.deepcopy(exact).to(torch.bfloat16))
    prompts = [rng.integers(3, VOCAB, 1100).tolist(), rng.integers(3, VOCAB, 30).tolist()]
    params = prefixkit.SamplingParams(n=128, max_new_tokens=24, seed=0, stop_token_ids=(5, 9))  # rows are compacted
    with prefixkit.Session(model) as session:
        found = [*session.generate(prompts, params, on_step=occupy)]
        assert session.report.graph_steps > 0
    ours, theirs = errors_of(model, exact, prompts, found[::13])
    prefixkit.unpatch(model)
    assert ours <= 1e-4 + 1.5 * theirs, (ours, theirs)
