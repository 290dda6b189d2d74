"""KV that outlives calls on the GPU: found again, evicted, swapped to host memory and back, scored, saved, loaded."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import MemoryPolicy, Session
from tests.gpu.test_model import model_of, prompts

OPTIONS: dict[str, Any] = {"n": 8, "max_new_tokens": 70, "temperature": 0.9, "seed": 3, "stop_token_ids": ()}


def logprob_errors(
    model: torch.nn.Module, exact: torch.nn.Module, given: list[list[int]], result: Any
) -> tuple[float, ...]:
    """Mean squared errors of the samples' log-probabilities, and of the unpatched model's: both against float64."""
    ours, stock = [], []
    for sample in result:
        prompt = given[sample.prompt_index]
        ids = torch.tensor([[*prompt, *sample.tokens]], device="cuda")
        rows, targets = slice(len(prompt) - 1, -1), torch.tensor(sample.tokens, device="cuda")[:, None]
        with torch.no_grad():
            truth = exact(ids).logits[0, rows].log_softmax(-1).gather(1, targets)[:, 0]
            plain = model(ids).logits[0, rows].double().log_softmax(-1).gather(1, targets)[:, 0]
        ours.append((torch.tensor(sample.logprobs, device="cuda").double() - truth).square())
        stock.append((plain - truth).square())
    return float(torch.cat(ours).mean().sqrt()), float(torch.cat(stock).mean().sqrt())


@pytest.mark.parametrize("how", ["swap", "recompute", "auto"])
def test_samples_under_pressure_err_no_more_than_the_unpatched_model(how: Any) -> None:
    """48 samples of 70 tokens, and pages for about a third of them."""
    model = model_of(64, torch.bfloat16)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    prefixkit.patch(model)
    given = prompts(11)
    policy = MemoryPolicy(preemption=how, headroom=16)
    with Session(model, kv_budget="4400KiB", memory=policy) as session:  # 2 KiB a token
        for _ in range(2):
            result = session.generate(given, **OPTIONS)
            report = result.report
            assert report.preempted_swapped + report.preempted_recomputed > 0
            assert how != "swap" or report.kv_bytes_swapped > 0
            assert len(result) == 48
            ours, stock = logprob_errors(plain, exact, given, result)
            assert ours <= 1.5 * stock
        store = session.store
        assert store is not None and store.tree.pages_held() == 0


def test_a_session_frees_its_pool_and_graphs_and_waits_for_no_garbage_collector() -> None:
    model = prefixkit.patch(model_of(64, torch.bfloat16))
    held = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with Session(model, kv_budget="512MiB") as session:
                assert session.generate(prompts(3), **OPTIONS).report.graph_steps > 0
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert max(held[1:]) - held[0] < 64 << 20, held


@pytest.mark.parametrize("how", ["swap", "recompute"])
def test_samples_under_pressure_are_the_same_in_float32(how: Any) -> None:
    model, given = prefixkit.patch(model_of(64, torch.float32)), prompts(12)
    with Session(model, kv_budget="1GiB") as session:
        expected = [(one.prompt_index, one.index, one.tokens) for one in session.generate(given, **OPTIONS)]
    with Session(model, kv_budget="8800KiB", memory=MemoryPolicy(preemption=how, headroom=16)) as session:
        result = session.generate(given, **OPTIONS)
        assert result.report.preempted_swapped + result.report.preempted_recomputed > 0
        assert alike(result, expected)


def alike(result: Any, expected: list[tuple[int, int, list[int]]]) -> bool:
    """Whether samples are the same but for near-ties, which matrix products of other shapes decide in another way."""
    found = [(one.prompt_index, one.index, one.tokens) for one in result]
    differ = sum(one != other for one, other in zip(found, expected, strict=True))
    print(f"{differ} of {len(found)} differ")
    return differ <= len(found) // 16


def test_a_second_call_computes_what_is_new_and_captures_nothing() -> None:
    model = model_of(64, torch.bfloat16)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    prefixkit.patch(model)
    given = prompts(13)
    with Session(model, kv_budget="64MiB") as session:
        session.generate(given, **OPTIONS)
        session.generate([[*one[:700], 5, 6, 7] for one in given[:1]], **OPTIONS | {"n": 48})
        later = [[*one[:720], 9, 9, 9] for one in given]
        result = session.generate(later, **OPTIONS)
        assert result.report.prompt_tokens_found >= 6 * 700
        assert result.report.tokens_computed <= 6 * 23 + 48 * 70
        assert result.report.captures == 0
        ours, stock = logprob_errors(plain, exact, later, result)
        assert ours <= 1.5 * stock


def test_beams_and_samples_under_pressure() -> None:
    model = prefixkit.patch(model_of(64, torch.float32))
    params = prefixkit.BeamParams(4, max_new_tokens=20, stop_token_ids=())
    requests = [prefixkit.Request(i, np.array(one), params) for i, one in enumerate(prompts(14)[:3])]
    sampling = prefixkit.SamplingParams(n=16, max_new_tokens=60, seed=4, stop_token_ids=())
    requests += [prefixkit.Request(3 + i, np.array(one), sampling) for i, one in enumerate(prompts(14)[3:])]
    with Session(model, kv_budget="1GiB") as session:
        expected = [(one.prompt_index, one.index, one.tokens) for one in session.run(requests)]
    with Session(model, kv_budget="8MiB", memory=MemoryPolicy(preemption="swap", headroom=16)) as session:
        result = session.run(requests)
        assert result.report.preempted_swapped > 0
        assert alike(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_err_no_more_than_the_unpatched_model(dtype: torch.dtype) -> None:
    model = model_of(64, dtype)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    prefixkit.patch(model)
    given = prompts(15)[:3]
    continuations = [[7, 8, 9, 10], [7, 8, 3], [7, 8, 9, 11, 12], [4]]
    with Session(model, kv_budget="64MiB") as session:
        session.generate(given, max_new_tokens=4)
        scores = session.score(given, continuations)
    ours, stock = [], []
    for prompt, own in zip(given, scores, strict=True):
        for tokens, score in zip(continuations, own, strict=True):
            ids = torch.tensor([[*prompt, *tokens]], device="cuda")
            rows, targets = slice(len(prompt) - 1, -1), torch.tensor(tokens, device="cuda")[:, None]
            with torch.no_grad():
                truth = exact(ids).logits[0, rows].log_softmax(-1).gather(1, targets)[:, 0]
                rounded = plain(ids).logits[0, rows].double().log_softmax(-1).gather(1, targets)[:, 0]
            ours.append((torch.tensor(np.asarray(score.logprobs), device="cuda").double() - truth).square())
            stock.append((rounded - truth).square())
    assert float(torch.cat(ours).mean()) <= 1.5**2 * float(torch.cat(stock).mean())


def test_prefixes_are_saved_and_loaded(tmp_path: Path) -> None:
    model, given = prefixkit.patch(model_of(64, torch.bfloat16)), prompts(16)
    path = tmp_path / "prefixes.safetensors"
    with Session(model, kv_budget="64MiB") as session:
        saved = session.save(path, given)
        store = session.store
        assert store is not None
        slots = store.tree.match(given[0]).node.slots
        before = torch.cat(store.pool.read(slots))
    with Session(model, kv_budget="64MiB", page_size=32) as session:
        assert session.load(path) == saved <= 700 + sum(len(one) - 700 for one in given)
        store = session.store
        assert store is not None
        after = torch.cat(store.pool.read(store.tree.match(given[0]).node.slots))
        assert torch.equal(after, before)
        report = session.generate(given, max_new_tokens=1).report
        assert report.tokens_computed == len(given)


def test_generate_finds_the_tokens_of_an_earlier_call() -> None:
    model = model_of(64, torch.bfloat16)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    prefixkit.patch(model)
    (first, second, *_) = prompts(17)
    options = {"max_new_tokens": 30, "pad_token_id": 0, "eos_token_id": None}
    counts: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    ids = torch.tensor([first], device="cuda")
    model.generate(ids, attention_mask=torch.ones_like(ids), num_return_sequences=4, do_sample=True, **options)
    counts.clear()
    ids = torch.tensor([second], device="cuda")
    scores = {"output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, do_sample=True, num_return_sequences=4, **options, **scores)
    assert counts[0] == len(second) - 700
    with torch.no_grad():
        truth = exact(out.sequences).logits[:, len(second) - 1 : -1].transpose(0, 1)
        rounded = plain(out.sequences).logits[:, len(second) - 1 : -1].transpose(0, 1).double()
    found = torch.stack(out.logits).double()
    assert float((found - truth).norm()) <= 1.5 * float((rounded - truth).norm())


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_survives_the_way_to_host_memory_and_back(page_size: int, dtype: torch.dtype) -> None:
    from prefixkit.kv.kv_pool import KVPool
    from prefixkit.testing.kv_specs import spec_of_alike

    torch.manual_seed(0)
    pool = KVPool(spec_of_alike(3, 2, 64, dtype, torch.device("cuda")), -(-4000 // page_size), page_size)
    for layer in range(3):
        pool.pages(layer)[0].normal_()
        pool.pages(layer)[1].normal_()
    slots = np.random.default_rng(0).permutation(4000)[:900].astype(np.int64)
    before = pool.read(slots)
    assert all(part.is_pinned() for part in before) and [tuple(part.shape) for part in before] == [(900, 768)]
    for layer in range(3):
        pool.pages(layer)[0].fill_(torch.nan)
        pool.pages(layer)[1].fill_(torch.nan)
    target = np.random.default_rng(1).permutation(4000)[:900].astype(np.int64)
    pool.write(target, before, np.arange(900)[::-1].copy())
    assert torch.equal(torch.cat(pool.read(target)), torch.cat(before).flip(0))
