"""Arguments of ``generate()`` that a tree may pass over because they change nothing, and those it may not."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from prefixkit import TreeCache, patch, unpatch
from prefixkit.testing.tiny import byte_tokenizer, tiny_llama
from tests.models.generate.generating import BEAMS, IMAGES, SAMPLED, compared, generate, image_model
from tests.models.tiny_families import make_model


@pytest.mark.parametrize("options", [{"do_sample": True, "num_return_sequences": 4}, {"num_beams": 3}])
def test_a_tokenizer_that_finds_stop_strings(options, rng):
    tokenizer = byte_tokenizer()
    inputs = {"input_ids": torch.from_numpy(rng.integers(5, 200, (1, 20)))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    stop = [tokenizer.decode([token]) for token in range(70)]
    options = {"eos_token_id": None, "max_new_tokens": 40, **options}
    models = (tiny_llama(seed=int(seed)) for seed in rng.integers(1000, size=100))
    stopped = {**options, "stop_strings": stop, "tokenizer": tokenizer}
    model = next(model for model in models if generate(model, inputs, **stopped).shape[1] < 60)  # most are
    for given in ({"stop_strings": stop}, {"stop_strings": stop, "assistant_tokenizer": tokenizer}):
        want, got, cache = compared(model, inputs, **options, **given, tokenizer=tokenizer)
        assert isinstance(cache, TreeCache)
        assert not cache.fell_back
        assert torch.equal(got, want)
        assert 20 < want.shape[1] < 60


@pytest.mark.parametrize("given", [{"is_causal": True}, {"num_items_in_batch": 7}])
def test_what_asks_for_what_a_tree_does(given, padded):
    want, got, cache = compared(make_model(), padded, **SAMPLED, **given)
    assert not cache.fell_back
    assert torch.equal(got, want)


def test_what_a_model_asks_for_itself_is_not_ignored(padded, said):
    model = make_model()

    class Asking(type(model)):
        def forward(self, *args, tokenizer=None, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Asking
    generate(patch(model, tree_cache="always"), padded, **SAMPLED, tokenizer=byte_tokenizer())
    assert "attention over a tree would ignore tokenizer" in said()[0]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *((model_type, options) for model_type in IMAGES for options in (SAMPLED, BEAMS)),
        ("gemma3", {"do_sample": False, "prefill_chunk_size": 13}),  # each chunk comes with the kinds of all before
    ],
)
def test_kinds_of_tokens_that_say_that_all_is_text(model_type, options, padded):
    model, name = image_model(model_type)
    given = {**padded, name: torch.zeros_like(padded["input_ids"])}
    want, got, cache = compared(model, given, **options)
    assert not cache.fell_back
    assert torch.equal(got, want)


@pytest.mark.parametrize("model_type", IMAGES)
def test_kinds_of_tokens_of_images_are_not_ignored(model_type, padded, said):
    model, name = image_model(model_type)
    given = {**padded, name: torch.zeros_like(padded["input_ids"])}
    given[name][:, 13:16] = 1
    want, got, cache = compared(model, given, do_sample=False)
    assert torch.equal(got, want)
    assert type(cache) is DynamicCache
    assert f"would ignore {name}" in said()[0]


@pytest.mark.parametrize(("model_type", "taken"), [("bert", True), ("gpt2", False)])
def test_kinds_of_tokens_that_a_model_embeds(model_type, taken, padded, said):
    model = make_model(model_type, is_decoder=True)
    for kind in (0, 1):
        given = {**padded, "token_type_ids": torch.full_like(padded["input_ids"], kind)}
        want, got, cache = compared(model, given, do_sample=False)
        assert torch.equal(got, want)
        assert isinstance(cache, TreeCache) == (taken and kind == 0)
    assert "attention over a tree would ignore token_type_ids" in said()[-1]


def test_kinds_are_looked_at_again_once_weights_have_changed(padded):
    model = patch(make_model("gpt2"), tree_cache="always")
    rows, found = model.transformer.wte.weight, []
    with torch.no_grad():
        kept, zeros = rows[0].clone(), torch.zeros_like(padded["input_ids"])
        padded["attention_mask"][:], padded["input_ids"][:, :9] = 1, 9
        for row in (torch.zeros_like(kept), kept):
            rows[0] = row
            want = generate(unpatch(copy.deepcopy(model)), padded, token_type_ids=zeros, do_sample=False)
            got = generate(model, padded, token_type_ids=zeros, do_sample=False, return_dict_in_generate=True)
            assert torch.equal(got.sequences, want)
            found.append(isinstance(got.past_key_values, TreeCache))
    assert found == [True, False]
