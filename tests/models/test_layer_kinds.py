"""Layers of several kinds in one model: latents, V unlike K, heads of two sizes, shared KV, chunks."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import prefixkit
from prefixkit import TreeCache
from prefixkit.models import facts_of, kv_spec
from prefixkit.torch_private import without_memory
from prefixkit.tree.pages import pages_for
from tests.models.generate.generating import BEAMS, SAMPLED, compared
from tests.models.tiny_families import ALTERNATE, FEW_EXPERTS, VOCAB, WINDOW, make_model

LATENTS = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
LATENTS |= {"num_key_value_heads": 4}
FOUR: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED = FOUR | {"head_dim": 16, "num_kv_shared_layers": 2, "sliding_window": WINDOW}
SHARED |= {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENTS | {"v_head_dim": 16, "first_k_dense_replace": 2},
    "minicpm3": LATENTS | {"v_head_dim": 24},  # as large as a head of K
    "gemma4_text": SHARED | {"global_head_dim": 32},
    "gemma3n_text": SHARED | {"laurel_rank": 8, "altup_num_inputs": 2} | {"activation_sparsity_pattern": [0.0] * 4},
    "mimo_v2_flash": ALTERNATE
    | FEW_EXPERTS
    | {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 2},
    "llama4_text": {"head_dim": 16, "attention_chunk_size": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}
    | {"no_rope_layers": [1, 0], "floor_scale": 10**6},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.drawn(2)
def test_a_tree_gives_the_logits_of_the_original_model(kind, tiny, drive, dense_logits, rng):
    """Prompts in steps of 13 tokens, then decode steps of all sequences."""
    model = tiny(kind, **KINDS[kind])
    run, head = drive(model), rng.integers(3, VOCAB, 20).tolist()
    sequences = [run.tree.insert([*head, *rng.integers(3, VOCAB, own).tolist()]) for own in (1, 9, 17)]
    run.run(13)
    sequences += run.tree.fork(sequences[1], 2)
    for _ in range(9):
        run.tree.extend_each(sequences, rng.integers(3, VOCAB, len(sequences)).tolist())
        run.run()
    for sequence in sequences:
        tokens = sequence.tokens().tolist()
        assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4
    assert run.tokens_run == run.tree.snapshot().num_tokens, "a shared token runs once"


@pytest.mark.drawn(3)
@pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}], ids=["samples", "beams", "greedy"])
def test_tokens_are_those_without_the_patch(kind, options, rng):
    """Left-padded rows that share their head."""
    ids = torch.from_numpy(rng.integers(3, VOCAB, (3, 20)))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 5, 9)):
        ids[row, :pad], mask[row, :pad] = 0, 0
        ids[row, pad : pad + 6] = ids[0, :6]
    want, got, cache = compared(
        make_model(kind, **KINDS[kind]), {"input_ids": ids, "attention_mask": mask}, max_new_tokens=6, **options
    )
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)


def test_a_session_saves_what_it_has_computed_and_another_finds_it(kind, tmp_path, rng):
    model = prefixkit.patch(make_model(kind, **KINDS[kind]))
    prompt, options = rng.integers(3, VOCAB, 40).tolist(), {"n": 3, "max_new_tokens": 6, "stop_token_ids": ()}
    with prefixkit.Session(model, kv_budget="4MiB") as session:
        want = [sample.tokens for sample in session.generate([prompt], **options)]
        session.save(tmp_path / "prefixes", [prompt])
    with prefixkit.Session(model, kv_budget="4MiB") as session:
        session.load(tmp_path / "prefixes")
        found = session.generate([prompt], **options)
    assert found.report.prompt_tokens_found >= 39
    assert [sample.tokens for sample in found] == want


def test_in_bfloat16_it_errs_no_more_than_the_unpatched_model(kind, drive, dense_logits, rng):
    """Against the same weights in float64; experts are few and all chosen alike, or an error would tip them."""
    every = {"num_experts_per_tok": KINDS[kind].get("n_routed_experts") or KINDS[kind].get("num_local_experts") or 1}
    model = make_model(kind, **{**KINDS[kind], **every}).bfloat16()
    exact, tokens = copy.deepcopy(model).float(), rng.integers(3, VOCAB, 60).tolist()
    reference, own = dense_logits(exact, tokens).double(), dense_logits(model, tokens).double()
    run = drive(model)
    run.tree.insert(tokens)
    run.run(25)
    assert (run.logits_of(tokens).double() - reference).norm() <= 1.5 * (own - reference).norm()


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma3n_text"])
def test_without_weights_each_layer_caches_what_it_does_with_them(kind):
    """As ``prefixkit inspect`` counts it."""
    model = make_model(kind, **KINDS[kind])
    with without_memory():
        empty = AutoModelForCausalLM.from_config(model.config)
    assert kv_spec(empty) == kv_spec(model)


def test_without_weights_experts_that_do_not_run_say_nothing(caplog):
    """All layers then count as the first, though their experts ask for values, or for another dtype."""
    with without_memory():
        empty = AutoModelForCausalLM.from_config(make_model("qwen3_moe").config)
    with caplog.at_level(logging.ERROR):
        assert kv_spec(empty) == kv_spec(make_model("qwen3_moe"))
    assert not caplog.records


@pytest.mark.parametrize("kind", ["deepseek_v3", "minicpm3"])
def test_latents_stay_as_small_as_they_are_cached(kind):
    spec = kv_spec(make_model(kind, **KINDS[kind]))
    assert spec.bytes_per_token == 2 * (16 + 8) * 4, "of two layers: latent and rotary numbers in float32"
    assert pages_for(1000, 16) * 16 <= 1.02 * 1000


def test_layers_that_share_kv_cache_none_of_their_own():
    facts = facts_of(make_model("gemma4_text", **KINDS["gemma4_text"]))
    assert [kind.reads for kind in facts.layers] == [None, None, 0, 1]
    assert len(facts.spec.layers) == 2
    assert len(facts.plan_kinds) == 2


def test_a_window_is_all_that_is_read_of_its_layers():
    """32 samples of a text of 600 tokens: each layer with a window reads it and at most a KV tile more."""
    model = prefixkit.patch(make_model("mistral", sliding_window=40, max_position_embeddings=1024))
    prompt = np.random.default_rng(0).integers(3, VOCAB, 600).tolist()
    with prefixkit.Session(model, kv_budget="8MiB", prefill_chunk=100) as session:
        session.prompt(prompt)
        before = session.report.kv_bytes_read
        session.generate([prompt], n=32, max_new_tokens=30, stop_token_ids=())
        read = (session.report.kv_bytes_read - before) / kv_spec(model).bytes_per_token
    assert read <= 32 * 30 * (40 + 64) + 40 + 64
