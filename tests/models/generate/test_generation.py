"""``model.generate()`` of a patched model: the same tokens as without the patch, with KV on a tree."""

from __future__ import annotations

import copy
import logging
import os
import pickle

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    DynamicCache,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from prefixkit import TreeCache, patch, unpatch
from prefixkit.models import NotPatched
from prefixkit.models.generate.forward import NotOnTree
from prefixkit.testing.tiny import byte_tokenizer, tiny_llama
from tests.models.tiny_families import PECULIAR, VOCAB, make_model

NEW = 14
ENDS = {"pad_token_id": 0, "eos_token_id": 2}
SAMPLED = {"do_sample": True, "num_return_sequences": 4}
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}


IMAGES = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids", "molmo2": "mm_token_type_ids"}


def image_model(model_type):
    """A tiny model of images and text, and the argument by which its processor tells them apart."""
    from scripts.tiny_models import tiny_config, tiny_model

    if model_type not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"image_model({model_type!r}): seed {seed}")
    torch.manual_seed(seed)
    return tiny_model(tiny_config(model_type), "", AutoModelForImageTextToText), IMAGES[model_type]


@pytest.fixture
def padded(rng):
    """Three rows of different length, left-padded, of which two share their first tokens."""
    ids = torch.from_numpy(rng.integers(3, VOCAB, (3, 20)))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 5, 9)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    ids[1, 5], ids[2, 9] = 5, 6
    ids[0, :6] = ids[1, 5:11]
    ids[0, 6], ids[1, 11] = 7, 8
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, seed=3, **options):
    torch.manual_seed(seed)
    return model.generate(**inputs, **{"max_new_tokens": NEW, **ENDS, **options})


def compared(model, inputs, mode="always", **options):
    """What the model generates unpatched, and patched with the cache that it returns."""
    want = generate(unpatch(model), inputs, **options)
    got = generate(patch(model, tree_cache=mode), inputs, **options, return_dict_in_generate=True)
    return want, got.sequences, got.past_key_values


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "prefixkit")
    return lambda: [one.getMessage() for one in caplog.records if "transformers' own cache" in one.getMessage()]


@pytest.mark.parametrize("family", sorted(PECULIAR))
@pytest.mark.parametrize("options", [SAMPLED, BEAMS], ids=["sampled", "beams"])
def test_the_tokens_of_each_family_are_those_without_the_patch(family, options, padded):
    want, got, cache = compared(make_model(family), padded, max_new_tokens=6, **options)
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "num_beams": 4},
        {"do_sample": True, "repetition_penalty": 1.3, "min_new_tokens": 9, "bad_words_ids": [[7], [8, 9]]},
        {"do_sample": True, "logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(30, 2, "cpu")])},
        {"do_sample": False, "stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids[:, -1] % 3 == 0])},
        {"do_sample": True, "num_return_sequences": 2, "prefill_chunk_size": 13},
        {"do_sample": False, "num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
    ],
    ids=["greedy", "beam-sample", "penalties", "processor", "criteria", "chunks", "early"],
)
def test_what_transformers_does_with_logits_stays_as_it_is(options, padded):
    want, got, cache = compared(make_model(), padded, **options)
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)


def test_scores_are_those_without_the_patch(padded):
    model, options = make_model(), {**SAMPLED, "output_scores": True, "return_dict_in_generate": True}
    want = generate(model, padded, **options)
    got = generate(patch(model), padded, **options)
    assert torch.equal(got.sequences, want.sequences)
    for mine, its in zip(got.scores, want.scores, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-5, atol=2e-5)


def test_a_streamer_gets_each_token(rng):
    class Keep(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.reshape(-1).tolist()

        def end(self):
            self.tokens.append("end")

    ids, keep = {"input_ids": torch.from_numpy(rng.integers(3, VOCAB, (1, 9)))}, Keep()
    out = generate(patch(make_model(), tree_cache="always"), ids, do_sample=False, streamer=keep)
    assert keep.tokens == [*out[0].tolist(), "end"]


@pytest.mark.parametrize("assisted", ["lookup", "assistant"])
def test_tokens_that_were_guessed_wrong_are_cropped(assisted, rng):
    model = make_model()
    inputs = {"input_ids": torch.from_numpy(rng.integers(3, VOCAB, (1, 4))).repeat(1, 4)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    guess = {"prompt_lookup_num_tokens": 3} if assisted == "lookup" else {"assistant_model": make_model()}
    want, got, cache = compared(model, inputs, do_sample=False, **guess)
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)
    assert cache.get_seq_length() == got.shape[1] - 1


class TestSharing:
    @pytest.mark.parametrize("options", [{"num_return_sequences": 16, "do_sample": True}, {"num_beams": 8}])
    def test_the_prompt_is_held_once_whatever_number_of_rows_goes_on(self, options, rng):
        ids = torch.from_numpy(rng.integers(3, VOCAB, (1, 40)))
        out = generate(
            patch(make_model()), {"input_ids": ids}, **options, return_dict_in_generate=True, eos_token_id=None
        )
        cache, rows = out.past_key_values, 16 if "do_sample" in options else 8
        assert (cache.batch_size, cache.get_seq_length()) == (rows, 40 + NEW - 1)
        if "do_sample" in options:
            assert cache.kv_tokens == 40 + rows * (NEW - 1)
        else:
            assert cache.kv_tokens <= 40 + rows * (NEW - 1)

    def test_tokens_shared_by_different_rows_are_computed_once(self, padded):
        out = generate(patch(make_model()), padded, **SAMPLED, return_dict_in_generate=True, eos_token_id=None)
        assert out.past_key_values.kv_tokens == 20 + 15 + 11 - 6 + 12 * (NEW - 1)

    def test_prompts_that_come_in_chunks_are_shared_too(self, rng):
        ids = torch.from_numpy(rng.integers(3, VOCAB, (1, 40)))
        options = {**SAMPLED, "prefill_chunk_size": 7, "eos_token_id": None}
        want, got, cache = compared(make_model(), {"input_ids": ids}, **options)
        assert torch.equal(got, want)
        assert cache.kv_tokens == 40 + 4 * (NEW - 1)

    def test_beams_that_move_copy_no_kv(self, padded, monkeypatch):
        from prefixkit.ops.kv_pool import KVPool

        def refuse(*args):
            raise AssertionError("KV was copied")

        monkeypatch.setattr(KVPool, "copy", refuse)
        monkeypatch.setattr(KVPool, "grown", refuse)
        want, got, _ = compared(make_model(), padded, num_beams=4, do_sample=False)
        assert torch.equal(got, want)


class TestModes:
    def test_auto_takes_a_tree_where_rows_share(self, rng):
        model, ids = patch(make_model()), torch.from_numpy(rng.integers(3, VOCAB, (2, 50)))
        for options, tree in (({"do_sample": False}, False), (SAMPLED, True), ({"num_beams": 2}, True)):
            out = generate(model, {"input_ids": ids}, **options, return_dict_in_generate=True)
            assert isinstance(out.past_key_values, TreeCache) == tree, options
        ids = torch.from_numpy(rng.integers(3, VOCAB, (2, 50)))
        ids[1, :40] = ids[0, :40]
        out = generate(model, {"input_ids": ids}, do_sample=False, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, TreeCache)

    def test_never_takes_none_of_its_own(self, padded):
        model = patch(make_model(), tree_cache="never")
        out = generate(model, padded, **SAMPLED, return_dict_in_generate=True)
        assert type(out.past_key_values) is DynamicCache
        out = generate(model, padded, **SAMPLED, return_dict_in_generate=True, past_key_values=TreeCache(model))
        assert isinstance(out.past_key_values, TreeCache)

    def test_patching_again_changes_the_mode_alone(self, padded):
        model = patch(make_model(), tree_cache="never")
        kinds = [type(module) for module in model.modules()]
        patch(model, tree_cache="always")
        assert [type(module) for module in model.modules()] == kinds
        out = generate(model, padded, do_sample=False, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, TreeCache)

    def test_another_mode_is_refused_before_anything_changes(self):
        model = make_model()
        with pytest.raises(ValueError, match=r"tree_cache must be one of 'auto', 'always', 'never', got 'sometimes'"):
            patch(model, tree_cache="sometimes")
        assert "prefixkit" not in type(model).__dict__.get("_prefixkit_original", "")

    def test_unpatching_leaves_no_trace(self):
        model = make_model()
        cls, state = type(model), set(model.__dict__)
        unpatch(patch(model, tree_cache="always"))
        assert type(model) is cls
        assert set(model.__dict__) == state

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_is_patched_too(self, copied, padded):
        model = copied(patch(make_model(), tree_cache="always"))
        out = generate(model, padded, do_sample=False, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, TreeCache)
        assert out.past_key_values.model is model


class TestWhatCannotBeOnATree:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is asked for"),
            ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is asked for"),
        ],
    )
    def test_runs_as_before_and_one_line_says_why(self, options, reason, padded, said):
        model = make_model()
        want = generate(model, padded, **SAMPLED, **options)
        got = generate(patch(model, tree_cache="always"), padded, **SAMPLED, **options)
        assert torch.equal(got.sequences, want.sequences)
        assert type(got.past_key_values) is DynamicCache
        assert len(said()) == 1
        assert reason in said()[0]

    @pytest.mark.parametrize("holes", ["right", "middle"])
    def test_masks_that_are_no_left_padding(self, holes, padded, said):
        mask, model = padded["attention_mask"], make_model()
        mask[1, 18:] = 0 if holes == "right" else mask[1, 18:]
        mask[2, 12] = 0
        want, got, cache = compared(model, padded, **SAMPLED)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "has holes, or padding on the right" in said()[0]

    def test_positions_that_the_model_would_count_from_elsewhere_than_zero(self, rng):
        model = patch(make_model("roberta", is_decoder=True, pad_token_id=1))
        tokens, cache = torch.from_numpy(rng.integers(3, 128, (2, 9))), TreeCache(model)
        with torch.no_grad():
            with pytest.raises(NotOnTree, match="without them the model counts from elsewhere than 0"):
                model(tokens, past_key_values=cache)
            at = torch.arange(9).expand(2, 9)
            got = model(tokens, position_ids=at, past_key_values=cache).logits
            torch.testing.assert_close(got, model(tokens, position_ids=at).logits)

    def test_embeddings(self, padded, said):
        model = make_model()
        given = {"inputs_embeds": model.get_input_embeddings()(padded["input_ids"]).detach()}
        given["attention_mask"] = padded["attention_mask"]
        want, got, cache = compared(model, given, do_sample=True, num_return_sequences=2)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "given as embeddings" in said()[0]

    @pytest.mark.parametrize("implementation", ["static", "offloaded"])
    def test_caches_that_were_asked_for(self, implementation, padded):
        if implementation == "offloaded" and not torch.cuda.is_available():
            pytest.skip("transformers offloads from GPUs")
        want, got, cache = compared(make_model(), padded, cache_implementation=implementation, do_sample=False)
        assert torch.equal(got, want)
        assert not isinstance(cache, TreeCache)

    def test_a_model_that_drops_at_random(self, padded, said):
        model = make_model(attention_dropout=0.5).train()
        want, got, cache = compared(model, padded, do_sample=False)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "attention_dropout is random" in said()[0]

    def test_in_training_mode_without_dropout_the_tree_is_taken(self, padded):
        want, got, cache = compared(make_model().train(), padded, **SAMPLED)
        assert torch.equal(got, want)
        assert isinstance(cache, TreeCache)

    def test_kv_that_does_not_fit(self, padded, said, monkeypatch):
        monkeypatch.setattr("prefixkit.kv.stores.free_memory", lambda device: 10_000)
        want, got, cache = compared(make_model(), padded, **SAMPLED)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "a tree cache takes at most 50% of" in said()[0]


class TestArgumentsThatChangeNothing:
    @pytest.mark.parametrize("options", [{"do_sample": True, "num_return_sequences": 4}, {"num_beams": 3}])
    def test_a_tokenizer_that_finds_stop_strings(self, options, rng):
        model, tokenizer = tiny_llama(seed=int(rng.integers(1000))), byte_tokenizer()
        inputs = {"input_ids": torch.from_numpy(rng.integers(5, 200, (1, 20)))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        options = {"eos_token_id": None, "max_new_tokens": 40, **options}
        stop = [tokenizer.decode([token]) for token in range(70)]
        for given in ({"stop_strings": stop}, {"stop_strings": stop, "assistant_tokenizer": tokenizer}):
            want, got, cache = compared(model, inputs, **options, **given, tokenizer=tokenizer)
            assert isinstance(cache, TreeCache)
            assert not cache.left
            assert torch.equal(got, want)
            assert 20 < want.shape[1] < 60

    @pytest.mark.parametrize("given", [{"is_causal": True}, {"num_items_in_batch": 7}])
    def test_what_asks_for_what_a_tree_does(self, given, padded):
        want, got, cache = compared(make_model(), padded, **SAMPLED, **given)
        assert not cache.left
        assert torch.equal(got, want)

    def test_what_a_model_asks_for_itself_is_not_ignored(self, padded, said):
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
    def test_kinds_of_tokens_that_say_that_all_is_text(self, model_type, options, padded):
        model, name = image_model(model_type)
        given = {**padded, name: torch.zeros_like(padded["input_ids"])}
        want, got, cache = compared(model, given, **options)
        assert not cache.left
        assert torch.equal(got, want)

    @pytest.mark.parametrize("model_type", IMAGES)
    def test_kinds_of_tokens_of_images_are_not_ignored(self, model_type, padded, said):
        model, name = image_model(model_type)
        given = {**padded, name: torch.zeros_like(padded["input_ids"])}
        given[name][:, 13:16] = 1
        want, got, cache = compared(model, given, do_sample=False)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert f"would ignore {name}" in said()[0]

    @pytest.mark.parametrize(("model_type", "taken"), [("bert", True), ("gpt2", False)])
    def test_kinds_of_tokens_that_a_model_embeds(self, model_type, taken, padded, said):
        model = make_model(model_type, is_decoder=True)
        for kind in (0, 1):
            given = {**padded, "token_type_ids": torch.full_like(padded["input_ids"], kind)}
            want, got, cache = compared(model, given, do_sample=False)
            assert torch.equal(got, want)
            assert isinstance(cache, TreeCache) == (taken and kind == 0)
        assert "attention over a tree would ignore token_type_ids" in said()[-1]

    def test_kinds_are_looked_at_again_once_weights_have_changed(self, padded):
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


class TestChunkedAttention:
    @staticmethod
    def model(**overrides):
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "no_rope_layers": [1, 0]}
        return make_model("llama4_text", head_dim=16, **experts, **overrides)

    @pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}])
    @pytest.mark.parametrize("limits", [(40, 8192), (24, 8192), (8192, 30)])
    def test_a_text_that_grows_past_its_chunk_goes_on_with_the_kv_of_before(self, options, limits, padded, said):
        """The second layer has no rotary embedding, and scales queries from ``floor_scale`` on."""
        model = self.model(attention_chunk_size=limits[0], floor_scale=limits[1])
        options = {**options, "eos_token_id": None}
        want, got, cache = compared(model, padded, **options)
        assert torch.equal(got, want)
        assert bool(said()) == (min(limits) < 20 + NEW - 1)
        assert all("a row comes to" in one for one in said())
        assert isinstance(cache, TreeCache) != bool(said())

    def test_a_prompt_that_is_longer_than_a_chunk(self, padded, said):
        want, got, cache = compared(self.model(attention_chunk_size=15), padded, **SAMPLED)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "a row comes to 20 tokens, and attention in chunks is causal for 15" in said()[0]

    def test_padding_is_no_part_of_a_chunk(self, padded):
        model = self.model(attention_chunk_size=17)
        short = {name: given[1:] for name, given in padded.items()}
        want, got, cache = compared(model, short, do_sample=False, max_new_tokens=2)
        assert isinstance(cache, TreeCache)
        assert torch.equal(got, want)

    def test_a_cache_of_ones_own_is_refused_and_stays_as_it_was(self, rng):
        model = patch(self.model(attention_chunk_size=12))
        ids, cache = torch.from_numpy(rng.integers(3, VOCAB, (2, 13))), TreeCache(model)
        with torch.no_grad():
            model(ids[:, :11], past_key_values=cache)
            with pytest.raises(NotOnTree, match="a row comes to 13 tokens, and attention in chunks is causal for 12"):
                model(ids[:, 11:], past_key_values=cache)
            got = model(ids[:, 11:12], past_key_values=cache).logits
            want = unpatch(model)(ids[:, :12]).logits[:, 11:]
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


class TestModelsThatOthersHaveChanged:
    @pytest.mark.parametrize("patched_first", [True, False])
    def test_mixed_precision_of_accelerate(self, patched_first, padded):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        def prepared(model):
            AcceleratorState._reset_state()
            return Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model, evaluation_mode=True)

        model = make_model()
        theirs, said = prepared(copy.deepcopy(model)), {"output_logits": True, "return_dict_in_generate": True}
        exact, want = (generate(each, padded, do_sample=False, **said).logits[0] for each in (model, theirs))
        model = prepared(patch(model)) if patched_first else patch(prepared(model))
        got = generate(model, padded, **SAMPLED, **said)
        assert isinstance(got.past_key_values, TreeCache)
        assert got.past_key_values.layers[0].keys.dtype == torch.bfloat16
        assert (got.logits[0][::4] - exact).abs().mean() <= 1.5 * (want - exact).abs().mean()
        AcceleratorState._reset_state()

    def test_autocast(self, padded):
        model = patch(make_model())
        with torch.autocast("cpu", torch.bfloat16):
            out = generate(model, padded, **SAMPLED, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, TreeCache)
        assert out.past_key_values.layers[0].keys.dtype == torch.bfloat16

    def test_a_forward_that_was_replaced_after_the_patch(self, padded, said):
        model = patch(make_model())
        want = generate(model, padded, **SAMPLED)
        inner = type(model).__mro__[1].forward
        model.forward = lambda *args, **kwargs: inner(model, *args, **kwargs)
        assert torch.equal(generate(model, padded, **SAMPLED), want)
        assert "forward was replaced after the patch" in said()[0]

    def test_a_forward_that_was_replaced_before_the_patch_comes_back(self, padded):
        model = make_model()
        calls, inner = [], model.forward
        model.forward = lambda *args, **kwargs: (calls.append(1), inner(*args, **kwargs))[1]
        before = model.forward
        out = generate(patch(model), padded, **SAMPLED, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, TreeCache)
        assert calls
        unpatch(model)
        assert model.__dict__["forward"] is before

    def test_a_class_made_of_the_patched_one(self, padded):
        """As FSDP makes one."""
        model = patch(make_model())
        model.__class__ = type("FSDP" + type(model).__name__, (type(model),), {})
        out = generate(model, padded, **SAMPLED, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, TreeCache)

    def test_adapters(self, padded):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(make_model(), config).eval()
        want, got, cache = compared(model, padded, **SAMPLED)
        assert torch.equal(got, want)
        assert isinstance(cache, TreeCache)
        with model.disable_adapter():
            plain = generate(model, padded, **SAMPLED)
        assert not torch.equal(plain, got)

    def test_prefix_tuning_goes_on_with_its_own_cache(self, padded):
        peft = pytest.importorskip("peft")
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(make_model(), config).eval()
        want, got, _ = compared(model, padded, do_sample=False)
        assert torch.equal(got, want)

    def test_a_forward_that_was_compiled_after_the_patch(self, padded, dynamo):
        want, model = generate(make_model(seed=2), padded, **SAMPLED), patch(make_model(seed=2))
        model.forward = torch.compile(model.forward, backend="eager")
        assert torch.equal(generate(model, padded, **SAMPLED), want)

    @pytest.mark.parametrize(("how", "when"), [("in place", "before"), ("wrapped", "after")])
    def test_layers_that_were_compiled_one_by_one(self, how, when, rng, dynamo):
        """Graphs serve any length, step and layer: no call makes one for what a cache holds."""
        plain, graphs, made = make_model(num_hidden_layers=5), [], []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        model = copy.deepcopy(plain) if when == "before" else patch(copy.deepcopy(plain), tree_cache="always")
        for index, layer in enumerate(model.model.layers):
            if how == "in place":
                layer.compile(backend=count)
            else:
                model.model.layers[index] = torch.compile(layer, backend=count)
        patch(model, tree_cache="always")
        for length in (7, 20, 33):
            inputs = {"input_ids": torch.from_numpy(rng.integers(3, VOCAB, (1, length)))}
            for options in (SAMPLED, BEAMS):
                options = {**options, "eos_token_id": None, "max_new_tokens": 5}
                got = generate(model, inputs, **options, return_dict_in_generate=True)
                assert not got.past_key_values.left
                assert torch.equal(got.sequences, generate(plain, inputs, **options))
            made.append(len(graphs))
        assert 0 < made[0] <= 8
        assert set(made) == set(made[:1])

    def test_hooks_of_the_model_run_once_a_call(self, padded):
        model, seen = patch(make_model()), []
        model.register_forward_hook(lambda module, args, out: seen.append(out.logits.shape[0]))
        generate(model, padded, **SAMPLED, eos_token_id=None)
        assert seen == [12] * NEW


class TestWhereAGenerationLeavesTheTree:
    def test_a_hole_that_comes_in_a_later_chunk(self, rng, said):
        ids, mask = torch.from_numpy(rng.integers(3, VOCAB, (2, 20))), torch.ones(2, 20, dtype=torch.int64)
        mask[1, 5:12] = 0
        for chunk in (1, 3):
            inputs = {"input_ids": ids, "attention_mask": mask, "prefill_chunk_size": chunk}
            want, got, _ = compared(make_model(), inputs, do_sample=False)
            assert torch.equal(got, want)
        assert said()

    @pytest.mark.parametrize("new", [1, 3])
    def test_a_mask_that_hides_what_was_seen(self, new, padded, said):
        model, outs = make_model(), []
        for prepare in (unpatch, patch):
            prepare(model)
            first = generate(model, padded, **SAMPLED, return_dict_in_generate=True, eos_token_id=None)
            longer = torch.cat([first.sequences[:, :-1], torch.full((12, new), 9)], 1)
            mask = torch.ones_like(longer)
            mask[:, :9], mask[:, 12:15] = 0, 0
            inputs = {"input_ids": longer, "attention_mask": mask, "past_key_values": first.past_key_values}
            outs.append((generate(model, inputs, do_sample=False), first.past_key_values))
        assert torch.equal(outs[0][0], outs[1][0])
        assert "hides other tokens" in said()[-1] or "holes" in said()[-1]
        left, stock = outs[1][1], outs[0][1]
        assert (left.get_seq_length(), len(left)) == (stock.get_seq_length(), len(stock)), "it is that cache by now"
        torch.testing.assert_close(left.layers[1].keys[:, :, 15:], stock.layers[1].keys[:, :, 15:])

    def test_rows_that_were_cropped_into_their_padding(self, padded):
        model, outs = make_model(), []
        for prepare in (unpatch, patch):
            prepare(model)
            cache = generate(model, padded, **SAMPLED, return_dict_in_generate=True).past_key_values
            cache.crop(7 - cache.get_seq_length())
            again = {name: given.repeat_interleave(4, 0) for name, given in padded.items()}
            outs.append(generate(model, again, do_sample=True, past_key_values=cache))
        assert torch.equal(*outs)

    def test_padding_does_not_come_back_unseen(self, padded):
        model = patch(make_model())
        cache = generate(model, padded, **SAMPLED, return_dict_in_generate=True, eos_token_id=None).past_key_values
        longer = torch.randint(3, VOCAB, (12, 20 + NEW))
        with pytest.raises(ValueError, match=r"lets rows see their padding, .* never computed; pass the same"):
            generate(model, {"input_ids": longer, "attention_mask": torch.ones_like(longer)}, past_key_values=cache)

    def test_a_model_that_was_changed_after_the_patch(self, rng, said):
        inputs = {"input_ids": torch.from_numpy(rng.integers(3, VOCAB, (2, 12)))}
        want = generate(make_model(seed=1).double(), inputs, **SAMPLED)
        model = patch(make_model(seed=1), tree_cache="always").double()
        assert torch.equal(generate(model, inputs, **SAMPLED), want)
        assert "are torch.float64" in said()[0]

    def test_an_assistant_that_is_the_model_without_its_last_layer(self, rng, said):
        inputs = {"input_ids": torch.from_numpy(rng.integers(3, VOCAB, (1, 12)))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        want, got, _ = compared(make_model(), inputs, do_sample=False, assistant_early_exit=1)
        assert torch.equal(got, want)
        assert "did not attend" in said()[0]


class TestACacheOfOnesOwn:
    @pytest.mark.parametrize("more", [-4, -1, 0, 1, 3])
    @pytest.mark.parametrize("family", ["llama", "gemma2"])
    def test_a_prompt_beside_a_cache_of_any_length_is_taken_as_transformers_takes_it(self, more, family, padded):
        """Also as many tokens as there are in the cache, or fewer, which transformers appends to them."""
        model, outs = make_model(family), []
        ids, there = (torch.cat([given, given[:, :5].clamp(min=1)], 1) for given in padded.values())
        for prepare in (unpatch, patch):
            prepare(model)
            for prompt in (padded, {"input_ids": padded["input_ids"][:, 9:]}):
                cache = TreeCache(model) if prepare is patch else DynamicCache(config=model.config)
                begin, end = 20 - prompt["input_ids"].shape[1], 20 + more
                mask = there[:, begin:end] if "attention_mask" in prompt else torch.ones_like(there[:, begin:end])
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                with torch.no_grad():
                    held = {"input_ids": ids[:, begin:end], "attention_mask": mask, "position_ids": positions}
                    model(**held, past_key_values=cache)
                outs.append((generate(model, prompt, do_sample=True, past_key_values=cache), cache.get_seq_length()))
        for want, got in zip(outs[:2], outs[2:], strict=True):
            assert torch.equal(got[0], want[0])
            assert got[1] == want[1]

    @pytest.mark.parametrize("new", [5, 9, 12])
    @pytest.mark.parametrize("given", ["nothing", "positions", "masks"])
    def test_tokens_go_on_from_those_it_holds_or_are_fed_again_as_with_transformers(self, new, given, rng, said):
        model, caches = make_model(), []
        held, ids, last = (torch.from_numpy(rng.integers(3, VOCAB, (2, count))) for count in (9, new, 1))
        more = {
            "nothing": {},
            "positions": {"position_ids": torch.arange(new)[None]},
            "masks": {"position_ids": torch.arange(new)[None], "attention_mask": torch.ones(2, new, dtype=torch.int64)},
        }[given]
        logits = []
        for prepare in (unpatch, patch):
            prepare(model)
            caches.append(TreeCache(model) if prepare is patch else DynamicCache())
            with torch.no_grad():
                model(held, past_key_values=caches[-1])
                logits.append(model(ids, past_key_values=caches[-1], **more).logits)
                caches[-1].batch_select_indices(torch.tensor([1, 0]))
                logits.append(model(last, past_key_values=caches[-1]).logits)
        torch.testing.assert_close(logits[2], logits[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(logits[3], logits[1], rtol=2e-5, atol=2e-5)
        assert len(said()) == (given != "nothing")
        assert [one.get_seq_length() for one in caches] == [10 + new] * 2

    def test_goes_on_where_it_was(self, padded):
        model = patch(make_model())
        cache = TreeCache(model, page_size=4)
        first = generate(model, padded, do_sample=False, past_key_values=cache, eos_token_id=None)
        mask = torch.cat([padded["attention_mask"], torch.ones(3, NEW + 5, dtype=torch.int64)], 1)
        longer = torch.cat([first, torch.randint(3, VOCAB, (3, 5))], 1)
        got = generate(model, {"input_ids": longer, "attention_mask": mask}, do_sample=False, past_key_values=cache)
        want = generate(unpatch(model), {"input_ids": longer, "attention_mask": mask}, do_sample=False)
        assert torch.equal(got, want)

    def test_rows_may_be_repeated_chosen_and_cropped(self, rng):
        model = patch(make_model())
        ids, cache = torch.from_numpy(rng.integers(3, VOCAB, (2, 11))), TreeCache(model)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.batch_repeat_interleave(3)
            cache.batch_select_indices(torch.tensor([5, 1, 0]))
            cache.crop(torch.tensor(-3))
            assert (cache.batch_size, cache.get_seq_length()) == (3, 8)
            more = torch.from_numpy(rng.integers(3, VOCAB, (3, 4)))
            got = model(more, past_key_values=cache).logits
            want = unpatch(model)(torch.cat([ids[[1, 0, 0], :8], more], 1)).logits[:, 8:]
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)

    def test_logits_of_all_tokens_come_where_they_are_wanted(self, padded):
        model = make_model()
        there = padded["attention_mask"].bool()
        positions = (there.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            want = model(**padded, position_ids=positions).logits
            patch(model)
            got = model(**padded, position_ids=positions, past_key_values=TreeCache(model)).logits
        torch.testing.assert_close(got[there], want[there], rtol=2e-5, atol=2e-5)
        assert (got[~there] == 0).all()

    def test_a_copy_goes_on_by_itself(self, padded):
        """As scripts do that compute a prompt once and deep-copy its cache for each question."""
        model = patch(make_model())
        cache, there = TreeCache(model, page_size=4), padded["attention_mask"]
        positions = (there.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            model(**padded, position_ids=positions, past_key_values=cache)
        mask = torch.cat([there, torch.ones(3, 2, dtype=torch.int64)], 1)
        for seed in range(2):
            torch.manual_seed(seed)
            longer = torch.cat([padded["input_ids"], torch.randint(3, VOCAB, (3, 2))], 1)
            inputs = {"input_ids": longer, "attention_mask": mask}
            mine = copy.deepcopy(cache)
            assert mine.model is model
            assert mine.kv_tokens == cache.kv_tokens == 20 + 15 + 11 - 6
            got = generate(patch(model), inputs, do_sample=False, past_key_values=mine)
            assert torch.equal(got, generate(unpatch(model), inputs, do_sample=False))
            assert cache.get_seq_length() == 20
            patch(model)

    def test_its_pool_grows_as_tokens_come(self, rng):
        model = patch(make_model())
        ids, cache = torch.from_numpy(rng.integers(3, VOCAB, (2, 5))), TreeCache(model, page_size=2)
        more = torch.from_numpy(rng.integers(3, VOCAB, (60, 2)))
        with torch.no_grad():
            model(ids, past_key_values=cache)
            got = torch.stack([model(one[:, None], past_key_values=cache).logits[:, 0] for one in more], 1)
            want = unpatch(model)(torch.cat([ids, more.T], 1)).logits[:, 5:]
        torch.testing.assert_close(got, want, rtol=3e-5, atol=3e-5)

    def test_is_refused_where_it_cannot_be_used(self, padded):
        model, other = patch(make_model()), patch(make_model())
        with pytest.raises(NotPatched, match=r"LlamaForCausalLM is not patched; call prefixkit.patch"):
            TreeCache(make_model())
        with pytest.raises(ValueError, match="belongs to another LlamaForCausalLM"):
            generate(model, padded, past_key_values=TreeCache(other))
        with pytest.raises(ValueError, match="output_hidden_states is asked for"):
            generate(model, padded, past_key_values=TreeCache(model), output_hidden_states=True)
        with pytest.raises(ValueError, match=r"has no backward; call the model under torch\.no_grad"):
            model(**padded, past_key_values=TreeCache(model))
        with pytest.raises(NotPatched, match="was given a TreeCache"):
            generate(make_model(), padded, past_key_values=TreeCache(model))
        cache = TreeCache(model)
        with torch.no_grad():
            model(padded["input_ids"], past_key_values=cache)
            with pytest.raises(ValueError, match="has 2 rows, and the cache 3"):
                model(padded["input_ids"][:2], past_key_values=cache)
        with pytest.raises(ValueError, match=r"crop: got 3 for 20 tokens; use a negative number"):
            cache.crop(3)

    def test_an_error_in_the_model_leaves_the_model_usable(self, padded):
        model = patch(make_model(), tree_cache="always")
        want = generate(model, padded, do_sample=False)
        handle = model.model.layers[1].register_forward_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("no")))
        with pytest.raises(RuntimeError, match="no"):
            generate(model, padded, do_sample=False)
        handle.remove()
        assert torch.equal(generate(model, padded, do_sample=False), want)


def test_the_steps_of_a_batch_plan_once(padded):
    """Rows that grow in place keep their plan: their tokens never come to the host."""
    model = patch(make_model())
    out = generate(model, padded, **SAMPLED, return_dict_in_generate=True, eos_token_id=None)
    assert out.past_key_values.runner.plans_made <= 3
    assert np.array_equal(out.past_key_values.padding, [0] * 4 + [5] * 4 + [9] * 4)
