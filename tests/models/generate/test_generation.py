"""``model.generate()`` of a patched model: the same tokens as without the patch, with KV on a tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from prefixkit import TreeCache, patch
from tests.models.generate.generating import BEAMS, NEW, SAMPLED, compared, generate
from tests.models.tiny_families import PECULIAR, VOCAB, make_model


@pytest.mark.drawn(6)
@pytest.mark.parametrize("family", sorted(PECULIAR))
def test_the_tokens_of_each_family_are_those_without_the_patch(family, padded):
    model = make_model(family)
    for options in (SAMPLED, BEAMS):
        want, got, cache = compared(model, padded, max_new_tokens=4, **options)
        assert isinstance(cache, TreeCache)
        assert torch.equal(got, want), options


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
        from prefixkit.kv.kv_pool import KVPool

        def refuse(*args):
            raise AssertionError("KV was copied")

        for how in ("copy", "grown"):
            monkeypatch.setattr(KVPool, how, refuse)
        want, got, _ = compared(make_model(), padded, num_beams=4, do_sample=False)
        assert torch.equal(got, want)


def test_the_steps_of_a_batch_plan_once(padded):
    """Rows that grow in place keep their plan: their tokens never come to the host."""
    model = patch(make_model())
    out = generate(model, padded, **SAMPLED, return_dict_in_generate=True, eos_token_id=None)
    assert out.past_key_values.steps.runner.counters()["plans"] <= 3
    assert np.array_equal(out.past_key_values.padding, [0] * 4 + [5] * 4 + [9] * 4)
