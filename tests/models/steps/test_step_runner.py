"""Which models' short steps run by CUDA graphs, and up to how many rows."""

from __future__ import annotations

import pytest
import torch

import prefixkit
from prefixkit import variants
from prefixkit.models.facts import facts_of
from prefixkit.models.steps.step_runner import short_rows, state_for_runner
from prefixkit.models.weights.state import weights_places
from prefixkit.testing.tiny import tiny_llama
from tests.models.tiny_families import make_model


def test_graphs_take_as_many_rows_as_a_gpu_computes_while_the_host_launches_a_step():
    few, many = (facts_of(tiny_llama(num_hidden_layers=layers)) for layers in (2, 6))
    assert 0 < short_rows(few) == pytest.approx(short_rows(many), rel=0.01), "both times grow with layers"
    wide = facts_of(tiny_llama(intermediate_size=4096))
    assert short_rows(wide) < short_rows(few) / 4


def test_packed_weights_count_as_those_that_they_stand_for():
    """As those of 4 bits, which are bytes of two numbers each, or words in a buffer."""
    model = tiny_llama()
    facts = facts_of(model)
    rows = short_rows(facts)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            words = torch.zeros(module.weight.numel() // 8, dtype=torch.int32)
            del module.weight
            module.register_buffer("weight", words)
    assert short_rows(facts) == rows


def test_the_head_and_embeddings_do_not_count():
    few, many = (facts_of(tiny_llama(vocab_size=size)) for size in (300, 30000))
    assert short_rows(few) == short_rows(many)


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss", "mamba", "qwen3_next"])
def test_layers_with_windows_or_states_run_by_graphs(model_type):
    assert short_rows(facts_of(make_model(model_type))) > 0


def test_variants_of_the_user_run_without_these_graphs():
    model = prefixkit.patch(tiny_llama(), variant=variants.soft_cap(30.0))
    assert short_rows(facts_of(model)) == 0


def test_a_state_that_was_read_says_where_weights_lie():
    model = tiny_llama()
    state = state_for_runner(facts_of(model))
    assert weights_places(model, state) == weights_places(model)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert weights_places(model, state_for_runner(facts_of(model))) == weights_places(model)


def test_a_runner_of_a_model_within_another_looks_at_both():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    assert state_for_runner(facts_of(model)) is None


def test_hooks_of_a_user_are_seen_and_those_that_record_outputs_for_transformers_are_not():
    model, seen = tiny_llama(), []
    assert not weights_places(model).hooked
    model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert not weights_places(model).hooked
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    assert weights_places(model).hooked
    handle.remove()
    assert not weights_places(model).hooked
