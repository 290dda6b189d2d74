"""Graphs of steps whose rows have grammars: masks are filled between a replay and the reading of its step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prefixkit.engine.request import BeamParams, Request
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import assert_all_given_back, beams_alone, random_prompts
from prefixkit.testing.fake_model import VOCAB
from tests.grammars import STOP, ResidueMatcher, Residues, alone, asked


def test_samples_are_what_they_would_be_alone_as_rows_are_compacted(decoding):
    """Samples end one after the other, so rows move to smaller buckets while tokens are on their way to the host."""
    made, model = decoding()
    prompts = random_prompts(3, 6)
    requests = []
    for index, prompt in enumerate(prompts):
        grammar = None if index == 2 else Residues(2 + index % 3, end=3 * index, most=99 if index % 4 else 5)
        params = SamplingParams(n=2, max_new_tokens=6 + 3 * index, seed=index, stop_token_ids=(STOP,), grammar=grammar)
        requests.append(asked(index, prompt, params))
    samples = made.run(requests)
    for sample in samples:
        expected = alone(prompts[sample.prompt_index], requests[sample.prompt_index].params, sample.index)
        assert (sample.tokens, sample.finish_reason) == expected
    assert made.report.graph_steps > 10
    assert made.report.grammar_waits > made.report.graph_steps, "each, and the first tokens"
    assert len(set(model.rows_per_step) & {13, 8, 5, 3, 2, 1}) > 2, "batches of fewer rows"
    assert_all_given_back(made)


def test_a_step_is_launched_before_the_host_has_seen_the_tokens_of_the_step_before(decoding):
    """So that masks are filled while the device is at the model's part of it."""
    done = []

    class Noted(ResidueMatcher):
        @classmethod
        def accept(cls, matchers, tokens):
            done.append("accept")
            return super().accept(matchers, tokens)

        @classmethod
        def fill(cls, matchers, rows, bits):
            done.append("fill")
            super().fill(matchers, rows, bits)

    made, _ = decoding(steps=lambda model, step: done.append("model") or model(step))
    params = SamplingParams(max_new_tokens=8, stop_token_ids=(), grammar=Residues(3, end=99))
    made.run([replace(asked(0, np.arange(7), params), matcher=Noted(params.grammar, VOCAB))])
    assert done[-18:] == ["model", "accept", "fill"] * 6


def test_how_tokens_were_drawn_comes_back_and_other_batches_go_on_as_before(decoding):
    made, _ = decoding()
    plain = SamplingParams(n=2, max_new_tokens=8, seed=1)
    before = made.run([asked(0, range(9), plain)])
    own = SamplingParams(n=3, max_new_tokens=8, seed=1, logprobs="sampled", grammar=Residues(VERY_FEW, end=99))
    for sample in made.run([asked(0, range(9), own)]):
        assert sample.masses == [1.0] * 8
        assert all(-1.5 < logprob <= 0 for logprob in sample.logprobs), "of two tokens or three"
    assert [s.tokens for s in made.run([asked(0, range(9), plain)])] == [s.tokens for s in before]


def test_searches_beside_grammars_find_what_they_find_alone(decoding):
    """Batches of beams change at every step: the host samples from the logits of their graphs."""
    made, _ = decoding()
    prompt, search = np.arange(7), BeamParams(3, 2, max_new_tokens=8)
    held = SamplingParams(n=2, max_new_tokens=8, seed=1, stop_token_ids=(STOP,), grammar=Residues(3))
    samples = made.run([asked(0, prompt, held), Request(1, prompt, search)])
    assert [(s.tokens, s.finish_reason) for s in samples[:2]] == [alone(prompt, held, index) for index in range(2)]
    assert [s.tokens for s in samples[2:]] == [list(beam.tokens) for beam in beams_alone(prompt, search)]


VERY_FEW = 25  # of 50 tokens: two may follow
