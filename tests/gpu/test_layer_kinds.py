"""Layers of several kinds on a GPU: windows, two shapes of heads, shared KV, latents, layers that run several times."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.engine.request import Request, Sample
from prefixkit.models import facts_of
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from tests.models.test_looped import FAMILIES as LOOPED
from tests.models.test_looped import make as make_looped
from tests.models.tiny_families import VOCAB, make_model

SIZES: dict[str, Any] = {"hidden_size": 128, "initializer_range": 0.06, "max_position_embeddings": 1024}
WINDOWS = {
    "mistral": {"head_dim": 64, "sliding_window": 100},
    "gemma2": {"head_dim": 64, "sliding_window": 70},
    "gpt_oss": {"head_dim": 64, "sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 4},
    "llama4_text": {"head_dim": 64, "attention_chunk_size": 90, "num_local_experts": 2, "num_experts_per_tok": 1},
}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 50,
    "num_kv_shared_layers": 2,
    "num_hidden_layers": 4,
}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 |= {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
LATENTS = {"first_k_dense_replace": 2, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 16}
LATENTS |= {"qk_nope_head_dim": 32, "num_key_value_heads": 4}


def model_of(model_type: str, dtype: torch.dtype, **overrides: Any) -> Any:
    return make_model(model_type, **{**SIZES, **overrides}).to("cuda", dtype)


def requests(number: int, **params: Any) -> list[Request]:
    """Six prompts that share 300 tokens."""
    rng = np.random.default_rng(number)
    head = rng.integers(3, VOCAB, 300)
    own = [np.concatenate((head, rng.integers(3, VOCAB, rng.integers(3, 60)))) for _ in range(6)]
    return [Request(index, tokens, SamplingParams(**params)) for index, tokens in enumerate(own)]


def assert_greedy(model: Any, asked: list[Request], found: list[Sample]) -> None:
    """Each token is the likeliest one, but for what rounding may do: judged by the same weights in float32, and by the
    error that the unpatched model makes in bfloat16.
    """
    exact = copy.deepcopy(model).float()
    for sample in found:
        prompt = asked[sample.prompt_index].tokens.tolist()
        ids = torch.tensor([[*prompt, *sample.tokens]], device="cuda")
        with torch.no_grad():
            theirs, logits = (of(ids).logits[0, len(prompt) - 1 : -1].double() for of in (model, exact))
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        error = (theirs - logits).abs().max()
        assert (logits.amax(1) - chosen).max() <= 2 * 1.5 * error


@pytest.mark.parametrize("model_type", WINDOWS)
def test_graphs_read_windows_and_choose_what_the_model_does(model_type: str) -> None:
    """200 steps are three plans."""
    model = model_of(model_type, torch.bfloat16, **WINDOWS[model_type])
    asked = requests(3, n=1, temperature=0.0, max_new_tokens=200)
    with prefixkit.patched(model):
        engine = make_engine(model, asked)
        found, report = engine.run(asked), engine.report
        kinds = facts_of(model).layers
    assert_greedy(model, asked, found)
    assert report.graph_steps == report.decode_steps == 199
    most = sum(kind.visible.window or kind.visible.chunk or 560 for kind in kinds) / len(kinds)
    read, unshared = (
        count / engine.store.pool.spec.bytes_per_token
        for count in (report.kv_bytes_read, report.kv_bytes_read_unshared)
    )
    # A row reads its window, and what has fallen out of sight since the last plan; prompts are a step or two.
    assert read <= unshared + 6 * 200 * 64
    assert unshared <= 6 * 200 * most + 700 * most


def test_two_shapes_of_heads_and_shared_kv_decode_by_graphs() -> None:
    model = model_of("gemma4_text", torch.bfloat16, **GEMMA4)
    asked = requests(5, n=1, temperature=0.0, max_new_tokens=90)
    with prefixkit.patched(model):
        kinds = facts_of(model).layers
        assert len({kind.plan_kinds[0] for kind in kinds}) >= 2 and any(kind.reads is not None for kind in kinds)
        engine = make_engine(model, asked)
        found = engine.run(asked)
    assert_greedy(model, asked, found)
    assert engine.report.graph_steps == 89


@pytest.mark.parametrize("v_head_dim", [32, 48])
def test_latents_give_the_tokens_of_the_unpatched_model(v_head_dim: int) -> None:
    model = model_of("deepseek_v3", torch.float32, **{**LATENTS, "v_head_dim": v_head_dim})
    prompt = torch.from_numpy(np.random.default_rng(7).integers(3, VOCAB, (1, 80))).cuda()
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(prompt, **options)[0, 80:].tolist()
    with prefixkit.patched(model):
        session = prefixkit.Session(model, kv_budget="64MiB")
        found = session.generate([prompt[0].tolist()], n=1, max_new_tokens=24, temperature=0.0, stop_token_ids=())
    assert found[0].tokens == want


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", LOOPED)
def test_each_run_of_a_looped_layer_has_its_kv_in_graphs(family: str, compiled: bool) -> None:
    model = make_looped(family, head_dim=64, max_position_embeddings=1024).to("cuda", torch.bfloat16)
    asked = requests(9, n=1, temperature=0.0, max_new_tokens=40)
    with prefixkit.patched(model):
        engine = make_engine(model, asked, compiled=compiled)
        found = engine.run(asked)
    assert_greedy(model, asked, found)
    assert engine.report.graph_steps == engine.report.decode_steps == 39
