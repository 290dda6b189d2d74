"""Samples under grammars are those that each would be alone, whatever runs beside them and however steps are run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.runs.grammar_masks import GrammarMasks, GrammarPlace
from prefixkit.runners.batch import Pace
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import assert_all_given_back, random_prompts
from prefixkit.testing.fake_model import VOCAB, make_engine
from tests.grammars import STOP, ResidueMatcher, Residues, alone, asked

PARAMS = SamplingParams(n=2, temperature=0.9, max_new_tokens=12, seed=5, stop_token_ids=(STOP,))
GRAMMARS = [Residues(4), Residues(2, end=5), None, Residues(5, end=8, most=8), Residues(3, end=99, most=4)]


def requests_of(prompts, **fields):
    each = [SamplingParams(**{**vars(PARAMS), "grammar": GRAMMARS[i % 5], **fields}) for i in range(len(prompts))]
    return [asked(i, prompt, own) for i, (prompt, own) in enumerate(zip(prompts, each, strict=True))]


def assert_alone(samples, requests):
    """Each is what it would be alone, with the model's own log-probabilities."""
    for sample in samples:
        request = requests[sample.prompt_index]
        tokens, reason = alone(request.tokens, request.params, sample.index)
        assert (sample.tokens, sample.finish_reason) == (tokens, reason), request.params
        assert len(sample.logprobs) == len(tokens)
        assert np.isfinite(sample.logprobs).all()


@pytest.mark.parametrize(
    ("pace", "options"),
    [(Pace(1), {}), (Pace(2, 4, waited_for=8), {"page_size": 1, "stop_token_ids": ()}), (Pace(5), {"top_p": 0.9})],
    ids=["step by step", "ahead", "far ahead"],
)
def test_each_sample_is_what_it_would_be_alone(pace, options):
    prompts = random_prompts(1, 5)
    size = options.pop("page_size", 4)
    requests = requests_of(prompts, **options)
    made, _ = make_engine(pace=pace, page_size=size, prefill_chunk=20)
    samples = made.run(requests)
    assert len(samples) == 2 * len(prompts)
    assert_alone(samples, requests)
    assert {sample.finish_reason for sample in samples} == {"stop", "length", "dead_end"}
    assert made.report.grammar_waits > 0
    assert_all_given_back(made)


def test_preempted_samples_go_on_where_they_were():
    """A matcher would refuse a token that it has accepted before."""
    requests = requests_of(random_prompts(2, 4), max_new_tokens=14)
    for how in ("swap", "recompute"):
        policy = MemoryPolicy(preemption=how, headroom=4)
        made, _ = make_engine(num_pages=14, pace=Pace(2, 16, waited_for=8), policy=policy)
        assert_alone(made.run(requests), requests)
        assert made.report.preempted_swapped + made.report.preempted_recomputed > 0
        assert_all_given_back(made)


def test_the_text_of_samples_that_run_out_is_streamed_to_its_end():
    events = []
    made, _ = make_engine(on_token=events.append)
    requests = requests_of([[7, 8], [9, 10], [1], [2], [5, 6]], n=1)
    samples = made.run(requests)
    for sample in samples:
        own = [event for event in events if event.prompt_index == sample.prompt_index]
        assert [event.token for event in own if event.token >= 0] == sample.tokens
        assert [event.finish_reason for event in own if event.finish_reason] == [sample.finish_reason]
        no_token = sample.finish_reason == "dead_end"
        assert ((own[-1].token, own[-1].logprob) == (-1, -np.inf)) == no_token
    assert {sample.finish_reason for sample in samples} >= {"stop", "dead_end"}


def test_samples_without_a_token_have_masses_where_they_are_asked_for():
    made, _ = make_engine()
    params = SamplingParams(grammar=Residues(2, end=0, most=0), stop_token_ids=(), logprobs="sampled")
    requests = [asked(0, [7, 8], params), asked(1, [7, 8], replace(params, logprobs="model"))]
    samples = sorted(made.run(requests), key=lambda sample: sample.prompt_index)
    assert [sample.masses for sample in samples] == [[], None]
    assert [(sample.tokens, sample.finish_reason) for sample in samples] == [([], "stop")] * 2


def bits_of(masks, vocab):
    return np.unpackbits(masks.fill(vocab).view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)


def test_masks_are_of_the_models_vocabulary_and_stop_tokens_stand_where_the_text_may_end():
    grammar = Residues(4, end=1)
    places = [GrammarPlace(grammar.compile(VOCAB), stops) for stops in ((STOP,), (), (STOP, 4, 70))]
    masks = GrammarMasks([None, *places])
    for accepted in ([], [8]):
        if accepted:
            masks.accept(np.array(accepted * 4))
        may = np.isin(np.arange(VOCAB), grammar.allowed(accepted))
        for vocab in (VOCAB, 100, 33):  # padded, or cut
            found = bits_of(masks, vocab)
            assert found[0].all(), "a row without a grammar"
            for row, place in zip(found[1:], places, strict=True):
                expected = np.zeros(vocab, bool)
                expected[:VOCAB] = may[:vocab]
                expected[[token for token in place.stops if token < vocab]] = bool(accepted)
                assert np.array_equal(row, expected)


def test_a_sample_that_its_matcher_loses_may_sample_nothing(caplog):
    class Lost(ResidueMatcher):
        @classmethod
        def accept(cls, matchers, tokens):
            return [False] * len(matchers)

    place = GrammarPlace(Lost(Residues(1), VOCAB), ())
    masks = GrammarMasks([place])
    masks.accept(np.array([5]))
    assert not bits_of(masks, VOCAB).any()
    assert "refused token 5" in caplog.text
