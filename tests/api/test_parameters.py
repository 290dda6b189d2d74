"""Parameters that are refused."""

import copy
from functools import partial

import numpy as np
import pytest

import prefixkit
from prefixkit import BeamParams, Request, SamplingParams, Session
from prefixkit.models import NotPatched
from tests.api.cases import TOKENIZER
from tests.tiny import tiny_llama


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
        ({"kv_budget": "2 gigs"}, 'kv_budget: a size must look like "2GiB", .* got "2 gigs"'),
        ({"kv_budget": float("nan")}, "kv_budget"),
        ({"keep": False}, "keep=False drops every sample; pass on_sample"),
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
        ({"params": 3}, "params must be a list of SamplingParams, or one of them for all prompts, got int 3"),
        ({"params": {"n": 3}}, "params must be a list of SamplingParams, .* got dict"),
        ({"on_sample": 3}, "on_sample must be a function, got int 3"),
    ],
)
def test_parameters_of_another_type(model, option, message):
    with pytest.raises(TypeError, match=message):
        prefixkit.generate(model, TOKENIZER, **{"prompts": ["a"], **option})


@pytest.mark.parametrize("option", [{"prefill_chunk": "8"}, {"most_running": "8"}])
def test_numbers_of_a_session_of_another_type(model, option):
    with pytest.raises(TypeError, match=rf"{next(iter(option))} must be an integer, got str '8'"):
        prefixkit.Session(model, kv_budget="1MiB", **option)


class TestTheModelsGenerationConfig:
    @pytest.fixture
    def configured(self, model, monkeypatch):
        """The model, with a generation config of its own for one test."""
        monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
        return model

    def test_its_repetition_penalty_is_applied_where_none_is_given(self, configured):
        asked = {"n": 2, "max_new_tokens": 12, "seed": 3, "stop_token_ids": ()}
        plain = prefixkit.generate(configured, None, [[5, 6, 7]], **asked)
        want = prefixkit.generate(configured, None, [[5, 6, 7]], repetition_penalty=5.0, **asked)
        configured.generation_config.repetition_penalty = 5.0
        got = prefixkit.generate(configured, None, [[5, 6, 7]], **asked)
        assert [one.tokens for one in got] == [one.tokens for one in want] != [one.tokens for one in plain]
        own = prefixkit.generate(configured, None, [[5, 6, 7]], repetition_penalty=1.0, **asked)
        assert [one.tokens for one in own] == [one.tokens for one in plain]

    @pytest.mark.parametrize(
        ("name", "value"),
        [("no_repeat_ngram_size", 2), ("suppress_tokens", [7]), ("min_new_tokens", 3), ("typical_p", 0.9)],
    )
    def test_what_would_be_left_out_is_named(self, name, value, configured):
        setattr(configured.generation_config, name, value)
        for call in (prefixkit.generate, partial(prefixkit.beam_search, num_beams=2)):
            with pytest.raises(ValueError, match=rf"generation_config sets {name}=.*call model\.generate\(\)"):
                call(configured, None, [[5, 6, 7]], max_new_tokens=3)
        processors = SamplingParams(max_new_tokens=3, logits_processors=lambda: lambda ids, scores: scores)
        assert len(prefixkit.generate(configured, None, [[5, 6, 7]], processors)) == 1

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
