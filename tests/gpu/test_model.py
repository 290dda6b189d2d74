"""A patched bf16 model on the GPU: its logits err no more than unpatched, and it samples through the kernels."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import prefixkit
from prefixkit.engine.call import Call
from prefixkit.engine.request import Request
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.tiny import VOCAB, ByteTokenizer, tiny_llama

# The second and the last run on the portable kernel everywhere.
HEAD_DIMS = (64, 80, 128, 256)


def model_of(head_dim: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Four layers, 8 query heads over 2 KV heads."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": head_dim}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.06}
    return tiny_llama(seed=3, **sizes, **heads).to("cuda", dtype)


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 256, 700)
    return [[*head.tolist(), *rng.integers(0, 256, rng.integers(3, 90)).tolist()] for _ in range(6)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_logits_err_no_more_than_the_unpatched_models(head_dim: int) -> None:
    """Against the same bf16 weights in float64; both bf16 models round every activation, so their errors are alike."""
    print("seed 5")
    model = model_of(head_dim, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    sequences = prompts(5)
    requests = [Request(i, p, SamplingParams(max_new_tokens=1)) for i, p in enumerate(sequences)]
    with prefixkit.patched(model):
        engine = make_engine(model, requests)
        loop = engine.loop(Call())
        loop.start(requests)
        loop.scheduler.admit(0)
        groups = list(loop.scheduler.in_flight)
        while any(group.first_logits is None for group in groups):
            loop.step()
    logits = {tuple(group.request.tokens.tolist()): group.first_logits for group in groups}
    ours, stock = [], []
    for sequence in sequences:
        ids = torch.tensor([sequence], device="cuda")
        with torch.no_grad():
            truth = exact(ids).logits[0, -1]
            stock.append((model(ids).logits[0, -1].double() - truth).norm() / truth.norm())
            ours.append((logits[tuple(sequence)].double() - truth).norm() / truth.norm())
    assert max(ours) <= 1.5 * max(stock), (ours, stock)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_greedy_tokens_are_those_of_the_unpatched_model_where_it_is_sure(head_dim: int) -> None:
    """64 tokens of 6 prompts together.  bf16 decides near-ties by rounding: a sequence is compared up to the first
    token whose lead over the second, in float64, is within the unpatched model's own error."""
    model = model_of(head_dim, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    with prefixkit.patched(model):
        result = prefixkit.generate(
            model, ByteTokenizer(), prompts(6), temperature=0, max_new_tokens=64, stop_token_ids=()
        )
    compared = 0
    for sample, prompt in zip(result, prompts(6), strict=True):
        ids = torch.tensor([[*prompt, *sample.tokens]], device="cuda")
        with torch.no_grad():
            truth = exact(ids).logits[0, len(prompt) - 1 : -1]
            noise = (model(ids).logits[0, len(prompt) - 1 : -1].double() - truth).abs().amax(-1)
        top = truth.topk(2).values
        for step, token in enumerate(sample.tokens):
            if top[step, 0] - top[step, 1] > 2.5 * noise[step]:
                assert token == int(truth[step].argmax()), (sample.prompt_index, step)
                compared += 1
    assert compared > 64, "too few sure tokens to say anything"


def test_samples_do_not_depend_on_company_in_float32() -> None:
    model = prefixkit.patch(model_of(64, torch.float32))
    options = {"n": 3, "temperature": 0.9, "max_new_tokens": 24, "seed": 2}
    together = prefixkit.generate(model, ByteTokenizer(), prompts(7), **options)
    alone = prefixkit.generate(model, ByteTokenizer(), prompts(7)[2:3], **options)
    assert [sample.tokens for sample in alone] == [sample.tokens for sample in together.of_prompt(2)]
    assert max(max(sample.tokens) for sample in together) < VOCAB


def test_beams_are_searched_in_bfloat16() -> None:
    model = prefixkit.patch(model_of(128, torch.bfloat16))
    result = prefixkit.beam_search(model, ByteTokenizer(), prompts(8)[:2], num_beams=4, max_new_tokens=12)
    assert len(result) == 2
