"""Decoders with modules that do not run where they compute text, and that count positions from their cache's length."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import prefixkit
from prefixkit import TreeCache
from prefixkit.models import UnsupportedModel, facts_of, unpatch
from prefixkit.models.attention_class import patched_modules
from prefixkit.models.families import attention_layers
from prefixkit.models.probe.idle_modules import idle_modules
from scripts.tiny_models import tiny_config, tiny_model
from tests.models.generate.generating import BEAMS, SAMPLED, compared
from tests.models.tiny_families import VOCAB

DECODERS = ["bart", "marian", "pegasus", "blenderbot"]


def make(family, seed=0):
    torch.manual_seed(seed)
    names = ("vocab_size", "decoder_vocab_size") if family == "marian" else ("vocab_size",)
    return tiny_model(tiny_config(family, **dict.fromkeys(names, VOCAB)), f"{family}ForCausalLM")


@pytest.mark.parametrize("family", DECODERS)
def test_a_tree_gives_the_logits_of_the_original_model(family, drive, dense_logits, rng):
    """Whose positions are learned, or sinusoids; and what it knows of another text is not asked."""
    model = make(family)
    run, head = drive(model), rng.integers(3, VOCAB, 12).tolist()
    sequences = [run.tree.insert([*head, *rng.integers(3, VOCAB, own).tolist()]) for own in (1, 9)]
    sequences.append(run.tree.insert(rng.integers(3, VOCAB, 5).tolist()))
    run.run(7)
    sequences += run.tree.fork(sequences[1], 2)
    for _ in range(3):
        run.tree.extend_each(sequences, rng.integers(3, VOCAB, len(sequences)).tolist())
        run.run()
    for sequence in sequences:
        tokens = sequence.tokens().tolist()
        assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4


@pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}], ids=["samples", "beams", "greedy"])
def test_tokens_are_those_without_the_patch(options, rng):
    ids = torch.from_numpy(rng.integers(3, VOCAB, (2, 20)))
    ids[1, :11] = ids[0, :11]
    for pad in (0, 3):
        mask = torch.ones_like(ids)
        mask[1, :pad] = 0
        want, got, cache = compared(make("bart"), {"input_ids": ids, "attention_mask": mask}, **options)
        assert isinstance(cache, TreeCache) == (not pad), "the model counts padding"
        assert torch.equal(got, want)


def test_cross_attention_without_an_encoder_is_left_alone():
    model = make("bart")
    decoder = model.model.decoder.layers
    names = [f"model.decoder.layers.{number}" for number in range(len(decoder))]
    assert list(attention_layers(model)) == [f"{name}.self_attn" for name in names]
    prefixkit.patch(model)
    assert not {layer.encoder_attn for layer in decoder} & {*patched_modules(model)}
    assert facts_of(model).probed.takes_offsets
    assert not patched_modules(unpatch(model))


def test_what_runs_with_text_is_refused_still():
    model = make("bart")
    model.model.decoder.layers[0].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn \(BartAttention\) is bidirectional"):
        prefixkit.patch(model)


def test_a_model_that_cannot_run_has_no_idle_modules():
    """So that what is said of it stays what its structure says."""
    model = make("bart")
    modules = [model.model.decoder.layers[0].encoder_attn]
    assert idle_modules(model, modules) == set(modules)
    model.model.decoder.forward = None
    assert idle_modules(model, modules) == set()
    assert not modules[0]._forward_pre_hooks


@pytest.mark.parametrize("family", ["idefics2", "deepseek_ocr2"])
def test_layers_for_images_are_left_out(family, rng):
    if family not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    torch.manual_seed(0)
    model = tiny_model(tiny_config(family), "", AutoModelForImageTextToText)
    assert all("language_model" in name or "text_model" in name for name in attention_layers(model))
    ids = torch.from_numpy(rng.integers(100, 256, (1, 20)))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    want, got, cache = compared(model, given, max_new_tokens=5, **SAMPLED)
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)
