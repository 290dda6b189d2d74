"""Parameters that are refused."""

import copy
import itertools
from functools import partial

import numpy as np
import pytest
from transformers import GenerationConfig, WatermarkingConfig

import prefixkit
from prefixkit import BeamParams, Request, SamplingParams, Session
from prefixkit.models import NotPatched
from prefixkit.session.requests import REFUSED_FIELDS
from prefixkit.testing.tiny import tiny_llama
from tests.api.cases import TOKENIZER, tokens_of

# A value at which each refused field of a generation config changes what is sampled: token 0 is a token.
# What becomes of the other fields of transformers' GenerationConfig.
OTHER_FIELDS = {
    # End-of-sequence tokens where none are given, the others where neither params nor a field for them are.
    "applied": "eos_token_id stop_strings repetition_penalty length_penalty early_stopping",
    # Whatever the model's are, the parameters of a call say it.
    "parameters": "do_sample temperature top_k top_p min_p max_length max_new_tokens num_return_sequences",
    # Caches, compiling, drafts that the model verifies, outputs, tokens that are not sampled, and a softmax done twice.
    "harmless": "use_cache cache_implementation cache_config max_cache_len low_memory prefill_chunk_size "
    "compile_config disable_compile continuous_batching_config use_mtp num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size "
    "assistant_early_exit assistant_lookbehind target_lookbehind speculation_type output_attentions "
    "output_hidden_states output_scores output_logits return_dict_in_generate pad_token_id bos_token_id "
    "decoder_start_token_id renormalize_logits transformers_version _from_model_config _commit_hash",
}
REFUSED = {
    **{"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "min_length": 9, "min_new_tokens": 3},
    **{"epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "remove_invalid_values": True, "typical_p": 0.9, "top_h": 0.5},
    **{"guidance_scale": 0.0, "encoder_repetition_penalty": 1.5, "bad_words_ids": [[7]], "suppress_tokens": [7]},
    **{"begin_suppress_tokens": [0], "forced_bos_token_id": 0, "forced_eos_token_id": 0, "sequence_bias": {(7,): 1.0}},
    **{"exponential_decay_length_penalty": (2, 1.5), "watermarking_config": WatermarkingConfig(), "num_beams": 4},
    **{"num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.6, "dola_layers": "high", "constraints": [1]},
    **{"force_words_ids": [[7]], "max_time": 0.0, "token_healing": True, "is_assistant": True},
    **{"assistant_ensemble_weight": 0.5},
}
# As the generation_config.json of released models have them, and all else that is harmless.
RELEASED = [
    {"temperature": 0.6, "do_sample": True, "top_p": 0.9, "eos_token_id": [258, 259], "bos_token_id": 1},
    {"top_k": 20, "repetition_penalty": 1.0, "pad_token_id": 3, "max_length": 4096, "max_new_tokens": 2, "min_p": 0.1},
    {"cache_implementation": "hybrid", "do_sample": True, "num_return_sequences": 3, "cache_config": {"nbits": 4}},
    {
        **{"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "no_repeat_ngram_size": 0, "typical_p": 1.0},
        **{"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0, "top_k": 50},
        **{
            "remove_invalid_values": False,
            "min_length": 0,
            "bad_words_ids": [],
            "guidance_scale": 1,
            "temperature": 1.0,
        },
    },
    {
        **{"prompt_lookup_num_tokens": 3, "num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4},
        **{"renormalize_logits": True, "output_scores": True, "return_dict_in_generate": True, "use_mtp": True},
        **{"low_memory": True, "prefill_chunk_size": 8, "disable_compile": True, "decoder_start_token_id": 2},
    },
]


def test_a_model_that_is_not_patched():
    with pytest.raises(NotPatched, match=r"prefixkit\.patch\(model\)"):
        prefixkit.generate(tiny_llama(), TOKENIZER, ["a"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": [1, 2]}, "seed"),
        ({"seed": np.array([1, 2])}, "seed must be one integer or one per prompt, got 2 for 1 prompt"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"top_k": 10**400}, r"top_k must be at most 9223372036854775807, got 10"),
        ({"max_new_tokens": 2**63}, "max_new_tokens must be at most 9223372036854775807"),
        ({"stop_token_ids": [2**70]}, r"stop_token_ids must be at most .*; token ids are 0 to 2\*\*31 - 1"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids must be at least 0, got -1"),
        ({"stop_token_ids": [3, 260]}, "stop_token_ids: token 260 is outside the model's vocabulary of 260"),
        ({"kv_budget": "2 gigs"}, 'kv_budget: a size must look like "2GiB", .* got "2 gigs"'),
        ({"kv_budget": float("nan")}, "kv_budget"),
        ({"return_samples": False}, "return_samples=False drops every sample; pass on_sample"),
    ],
)
def test_parameters_out_of_range(model, option, message):
    with pytest.raises(ValueError, match=message):
        prefixkit.generate(model, TOKENIZER, ["a"], **option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"seed": True}, "seed must be an integer, got bool"),
        ({"seed": 1.5}, "seed must be one integer or one per prompt, got float 1.5"),
        ({"seed": None}, "seed must be one integer or one per prompt, got NoneType None"),
        ({"seed": "7"}, "seed must be one integer or one per prompt, got str '7'"),
        ({"seed": [1.5]}, "seed must be an integer, got float"),
        ({"seed": np.array([1.5])}, "seed must be an integer, got float"),
        ({"seed": np.array([[1]])}, "seed must be an integer, got list"),
        ({"stop": 7}, "stop must be a list of strings or functions, got int 7"),
        ({"stop": b"END"}, "stop must be a list of strings"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids, got int 7"),
        ({"kv_budget": True}, "kv_budget: .* got bool True"),
        ({"kv_budget": [1]}, "kv_budget: .* got list"),
        ({"prompts": None}, "prompts must be a list of prompts, got NoneType None; put a single one into a list"),
        ({"prompts": [5, 6, 7]}, r"prompt 0 must be .* got int 5; put the token ids of a single prompt into a list"),
        ({"prompts": [[5.0, 6.0]]}, r"got list of shape \[2\] and dtype float64; token ids are integers"),
        ({"prompts": [[[5, 6]]]}, r"got list of shape \[1, 2\] and dtype int64; pass each row by itself"),
        ({"params": 3}, "params must be a list of SamplingParams, or one of them for all prompts, got int 3"),
        ({"params": {"n": 3}}, "params must be a list of SamplingParams, .* got dict"),
        ({"on_sample": 3}, "on_sample must be a function, got int 3"),
    ],
)
def test_parameters_of_another_type(model, option, message):
    with pytest.raises(TypeError, match=message):
        prefixkit.generate(model, TOKENIZER, **{"prompts": ["a"], **option})


def test_stop_tokens_outside_the_vocabulary_are_refused_by_every_verb(model):
    session = Session(model, TOKENIZER)
    beams = BeamParams(2, stop_token_ids=[260])
    for call in (
        lambda: prefixkit.beam_search(model, TOKENIZER, ["a"], beams),
        lambda: session.generate(["a"], stop_token_ids=[260]),
        lambda: next(iter(session.stream(["a"], stop_token_ids=[260]))),
        lambda: session.beam_search(["a"], beams),
        lambda: session.run([Request(0, [5], beams)]),
        lambda: session.step([session.prompt("a")], stop_token_ids=[260]),
    ):
        with pytest.raises(ValueError, match="token 260 is outside the model's vocabulary of 260"):
            call()


@pytest.mark.parametrize("ends", [260, [-1, 2**40]])
def test_a_generation_config_may_name_end_tokens_that_the_model_lacks(ends):
    model = prefixkit.patch(tiny_llama())
    model.generation_config.eos_token_id = ends
    (sample,) = prefixkit.generate(model, TOKENIZER, ["a"], max_new_tokens=3)
    (unstopped,) = prefixkit.generate(model, TOKENIZER, ["a"], max_new_tokens=3, stop_token_ids=())
    assert sample.tokens == unstopped.tokens


@pytest.mark.parametrize("call", [prefixkit.generate, prefixkit.Session])
def test_a_model_without_weights_or_on_another_device_is_refused(call):
    model = prefixkit.patch(tiny_llama()).to("meta")
    with pytest.raises(prefixkit.UnsupportedModel, match=r"LlamaForCausalLM is on meta, .*; load its weights, or move"):
        call(model, TOKENIZER, *([["a"]] if call is prefixkit.generate else []))


@pytest.mark.parametrize("option", [{"prefill_chunk": "8"}, {"most_running": "8"}])
def test_numbers_of_a_session_of_another_type(model, option):
    with pytest.raises(TypeError, match=rf"{next(iter(option))} must be an integer, got str '8'"):
        prefixkit.Session(model, kv_budget="1MiB", **option)


def without_end(one):
    """An iterator that gives the same again and again."""
    return itertools.repeat(one)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("prompts", lambda session: session.generate(without_end("a"))),
        ("prompts", lambda session: session.beam_search(without_end([5]), num_beams=2)),
        ("params", lambda session: session.generate(["a"], without_end(SamplingParams()))),
        ("n", lambda session: session.generate(["a"], n=without_end(1))),
        ("seed", lambda session: session.generate(["a"], seed=itertools.count())),
        ("stop", lambda session: session.generate(["a"], stop=without_end("x"))),
        ("stop_token_ids", lambda session: session.generate(["a"], stop_token_ids=itertools.count())),
        ("requests", lambda session: session.run(without_end(Request(0, [5], SamplingParams())))),
        ("indices", lambda session: Request(0, [5], SamplingParams(), indices=itertools.count())),
        ("prompts", lambda session: session.score(without_end("a"), ["b"])),
        ("continuations", lambda session: session.score("a", without_end("b"))),
        ("continuations", lambda session: session.score("a", [itertools.count()])),
        ("continuations", lambda session: session.score(["a"], [without_end("b")])),
        ("seeds", lambda session: session.prompt("a").fork(2, seeds=itertools.count())),
        ("nodes", lambda session: session.step(without_end(session.prompt("a")))),
        ("params", lambda session: session.step(session.prompt("a"), without_end(SamplingParams()))),
        ("until", lambda session: session.step(session.prompt("a"), until=without_end("x"))),
        ("prefixes", lambda session: session.save("nowhere.safetensors", without_end("a"))),
    ],
)
def test_an_iterator_without_an_end_is_refused(model, name, call):
    with Session(model, TOKENIZER, kv_budget="1MiB") as session:
        with pytest.raises(ValueError, match=rf"{name} must be at most 4,194,304 .*: pass an iterable that ends"):
            call(session)
        assert len(session.generate(["a"], max_new_tokens=1)) == 1


def scored(scores):
    """The tokens that were scored."""
    return [scored(one) if isinstance(one, list) else one.tokens.tolist() for one in scores]


def test_what_can_be_read_once_is_read_once(model):
    """An iterator says what a list of the same says, for all arguments that are lists."""
    asked = {"max_new_tokens": 4, "stop_token_ids": ()}
    with Session(model, TOKENIZER, kv_budget="1MiB") as session:
        texts, params = ["ab", "ac"], [SamplingParams(n=2, stop=("x",), **asked)] * 2
        expected = tokens_of(session.generate(texts, params, seed=[3, 4]))
        got = session.generate(iter(texts), iter(params), n=iter([2, 2]), seed=iter([3, 4]), stop=iter("x"))
        assert tokens_of(got) == expected
        for prompts, continuations in (("ab", ["c", "de"]), (texts, ["c", "de"]), (texts, [["c"], ["d", "e"]])):
            read_once = iter([iter(own) if isinstance(own, list) else own for own in continuations])
            given = prompts if isinstance(prompts, str) else iter(prompts)
            assert scored(session.score(given, read_once)) == scored(session.score(prompts, continuations))
        assert scored(session.score("ab", [iter([5, 6])])) == [[5, 6]]
        nodes = session.prompt("ab").fork(2, seeds=iter([8, 9]))
        stepped = session.step(iter(nodes), iter([SamplingParams(**asked)] * 2), until=iter("x"))
        again = session.step(session.prompt("ab").fork(2, [8, 9]), [SamplingParams(**asked)] * 2, until=["x"])
        assert [node.tokens for node in stepped] == [node.tokens for node in again]


class TestTheModelsGenerationConfig:
    @pytest.fixture
    def configured(self, model):
        """The model, with a generation config of its own for one test."""
        kept = model.generation_config
        model.generation_config = copy.deepcopy(kept)
        yield model
        model.generation_config = kept

    def test_its_repetition_penalty_is_applied_where_none_is_given(self, configured):
        asked = {"n": 2, "max_new_tokens": 12, "seed": 3, "stop_token_ids": ()}
        plain = prefixkit.generate(configured, None, [[5, 6, 7]], **asked)
        want = prefixkit.generate(configured, None, [[5, 6, 7]], repetition_penalty=5.0, **asked)
        configured.generation_config.repetition_penalty = 5.0
        got = prefixkit.generate(configured, None, [[5, 6, 7]], **asked)
        assert [one.tokens for one in got] == [one.tokens for one in want] != [one.tokens for one in plain]
        own = prefixkit.generate(configured, None, [[5, 6, 7]], repetition_penalty=1.0, **asked)
        assert [one.tokens for one in own] == [one.tokens for one in plain]

    def test_each_field_that_transformers_has_is_applied_refused_or_harmless(self):
        classes = [name for fields in (*REFUSED_FIELDS.values(), *OTHER_FIELDS.values()) for name in fields.split()]
        assert len(set(classes)) == len(classes), "one answer for each"
        assert vars(GenerationConfig()).keys() - set(classes) == set(), "a field that no class says anything about"

    @pytest.mark.parametrize("name", list(REFUSED))
    def test_what_would_be_left_out_is_named(self, name, configured):
        value = REFUSED[name]
        setattr(configured.generation_config, name, value)
        beams = partial(prefixkit.beam_search, num_beams=2)
        for call in (prefixkit.generate, beams) if name != "num_beams" else (prefixkit.generate,):
            with pytest.raises(ValueError, match=rf"generation_config sets {name}=.*call model\.generate\(\).*or set "):
                call(configured, None, [[5, 6, 7]], max_new_tokens=3)
        processors = SamplingParams(max_new_tokens=3, logits_processors=lambda: lambda ids, scores: scores)
        if name in REFUSED_FIELDS["logits"].split():
            assert len(prefixkit.generate(configured, None, [[5, 6, 7]], processors)) == 1
        else:
            with pytest.raises(ValueError, match=f"generation_config sets {name}="):
                prefixkit.generate(configured, None, [[5, 6, 7]], processors)

    def test_the_refused_are_those_of_the_table(self):
        assert REFUSED.keys() == {*REFUSED_FIELDS["logits"].split(), *REFUSED_FIELDS["calls"].split()}

    @pytest.mark.parametrize("released", RELEASED, ids=lambda released: next(iter(released)))
    def test_what_released_models_set_changes_no_sample(self, released, configured):
        """Temperature, filters, lengths and beams are the call's own; caches, drafts and outputs change nothing."""
        asked = {"n": 2, "max_new_tokens": 6, "stop_token_ids": ()}
        plain = prefixkit.generate(configured, None, [[5, 6, 7]], **asked)
        configured.generation_config.update(**released)
        assert tokens_of(prefixkit.generate(configured, None, [[5, 6, 7]], **asked)) == tokens_of(plain)
        prefixkit.beam_search(configured, None, [[5, 6, 7]], num_beams=2, max_new_tokens=3)

    def test_its_stop_strings_are_applied_where_none_are_given(self, configured):
        asked = {"max_new_tokens": 12, "seed": 3, "stop_token_ids": ()}
        (plain,) = prefixkit.generate(configured, TOKENIZER, ["ab"], **asked)
        configured.generation_config.stop_strings = [plain.text[3]]
        (stopped,) = prefixkit.generate(configured, TOKENIZER, ["ab"], **asked)
        assert (stopped.text, stopped.finish_reason) == (plain.text.split(plain.text[3])[0], "stop")
        for own in ({"stop": ()}, {"params": SamplingParams(**asked)}):
            assert prefixkit.generate(configured, TOKENIZER, ["ab"], **{**own, **asked})[0].tokens == plain.tokens
        with pytest.raises(ValueError, match=r"tokenizer is None.*stop=\(\)"):
            prefixkit.generate(configured, None, [[5, 6]])
        with pytest.raises(ValueError, match="generation_config sets stop_strings="):
            prefixkit.beam_search(configured, TOKENIZER, ["ab"], num_beams=2)

    def test_its_length_penalty_and_early_stopping_are_those_of_beams_where_none_are_given(self, configured):
        asked = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "stop_token_ids": range(128)}
        scores = [
            [sample.score for sample in prefixkit.beam_search(configured, None, [[5, 6, 7]], **asked, **own)]
            for own in ({}, {"length_penalty": 0.0, "early_stopping": True})
        ]
        configured.generation_config.update(length_penalty=0.0, early_stopping=True)
        got = [sample.score for sample in prefixkit.beam_search(configured, None, [[5, 6, 7]], **asked)]
        assert got == scores[1] != scores[0]
        own = prefixkit.beam_search(configured, None, [[5, 6, 7]], BeamParams(**asked))
        assert [sample.score for sample in own] == scores[0]

    def test_a_prompt_is_kept_whatever_is_sampled_after_it(self, configured):
        configured.generation_config.num_beams = 4
        with Session(configured, kv_budget="1MiB") as session:
            session.pin([5, 6, 7])
            nodes = session.step(session.prompt([5, 6, 7]), BeamParams(4, max_new_tokens=2))
            assert [len(node) for node in nodes] == [5]
            with pytest.raises(ValueError, match="generation_config sets num_beams=4"):
                session.step(session.prompt([5, 6, 7]), max_new_tokens=2)

    def test_beams_have_no_penalty(self, configured):
        configured.generation_config.repetition_penalty = 1.2
        with pytest.raises(ValueError, match=r"generation_config sets repetition_penalty=1\.2"):
            prefixkit.beam_search(configured, None, [[5, 6, 7]], num_beams=2, max_new_tokens=3)
        beams, samples = BeamParams(2, max_new_tokens=3), SamplingParams(repetition_penalty=1.2, max_new_tokens=3)
        with Session(configured, kv_budget="1MiB") as session:
            nodes = session.prompt([5, 6, 7]).fork(2)
            for call in (
                lambda: session.run([Request(0, [5, 6, 7], samples), Request(1, [5, 6, 7], beams)]),
                lambda: session.step(nodes, [samples, beams]),
                lambda: session.step(nodes[0], beams),
            ):
                with pytest.raises(ValueError, match=r"generation_config sets repetition_penalty=1\.2"):
                    call()
            assert [len(node) for node in nodes] == [3, 3]
            assert len(session.step(nodes, samples)) == 2
