"""The engine over a fake model: right tokens, each prompt token computed once, every page given back."""

import weakref
from itertools import product

import numpy as np
import pytest

from prefixkit.engine.request import BeamParams, Request
from prefixkit.engine.runs.detokenizer import Detokenizer
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Pace
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import ReportingEngine
from prefixkit.testing.expected import alone, assert_all_given_back, beams_alone, random_prompts, run
from prefixkit.testing.fake_model import make_engine
from prefixkit.tree.eviction import PrefixCache
from prefixkit.tree.radix import PrefixTree
from tests.covering import pairwise_cover


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("seed", "page_size", "chunk"), pairwise_cover(product(range(5), (1, 3, 16), (7, 1024))))
def test_each_sample_is_what_it_would_be_alone(seed, page_size, chunk):
    params = SamplingParams(n=3, temperature=0.9, top_p=0.9, max_new_tokens=9, seed=seed, stop_token_ids=(3, 4))
    prompts = random_prompts(seed)
    engine, _ = make_engine(page_size=page_size, prefill_chunk=chunk)
    samples = run(engine, prompts, params)
    assert [(s.prompt_index, s.index) for s in samples] == [(p, i) for p in range(len(prompts)) for i in range(3)]
    for sample in samples:
        assert sample.tokens == alone(prompts[sample.prompt_index], params, sample.index)
        assert sample.finish_reason == ("stop" if sample.tokens[-1] in (3, 4) else "length")
        assert len(sample.logprobs) == len(sample.tokens)
    assert_all_given_back(engine)


@pytest.mark.parametrize("num_pages", [13, 20, 60, 4096])
def test_a_small_budget_makes_prompts_wait_but_changes_nothing_and_computes_no_prompt_token_twice(num_pages):
    params = SamplingParams(n=4, max_new_tokens=8, seed=5)
    prompts = random_prompts(1)
    engine, model = make_engine(num_pages=num_pages, page_size=4)
    samples = run(engine, prompts, params)
    assert [s.tokens for s in samples] == [alone(prompts[s.prompt_index], params, s.index) for s in samples]
    prompt_prefixes = {tuple(prompt[: i + 1].tolist()) for prompt in prompts for i in range(len(prompt))}
    twice = {prefix: count for prefix, count in model.computed.items() if prefix in prompt_prefixes and count > 1}
    assert not twice
    assert_all_given_back(engine)


def test_prompt_tokens_are_computed_once_and_in_chunks():
    engine, model = make_engine(prefill_chunk=10)
    prompts = random_prompts(2)
    run(engine, prompts, SamplingParams(n=2, max_new_tokens=3))
    distinct = {tuple(prompt[: i + 1].tolist()) for prompt in prompts for i in range(len(prompt))}
    assert engine.report.tokens_computed == len(distinct) + len(prompts) * 2 * 2
    assert max(model.rows_per_step) <= 10 + len(prompts) * 2
    assert engine.report.tokens_plain_batch == sum(2 * (len(prompt) + 2) for prompt in prompts)


def test_order_of_prompts_and_company_do_not_matter():
    params = SamplingParams(n=2, max_new_tokens=6, seed=9)
    prompts = random_prompts(3)
    forward = {s.tokens.__str__() + str(s.prompt_index) for s in run(make_engine()[0], prompts, params)}
    backward = run(make_engine(page_size=16)[0], prompts[::-1], params)
    assert forward == {str(s.tokens) + str(len(prompts) - 1 - s.prompt_index) for s in backward}
    single = run(make_engine()[0], prompts[2:3], params)
    assert {str(s.tokens) + "2" for s in single} <= forward


def test_samples_leave_at_once_when_they_finish_and_are_reported_as_they_do():
    arrived = []
    engine, model = make_engine(on_sample=lambda sample: arrived.append(sample))
    params = SamplingParams(n=16, max_new_tokens=12, stop_token_ids=tuple(range(8)), seed=2)
    samples = run(engine, [np.arange(20)], params)
    lengths = sorted(len(sample.tokens) for sample in samples)
    assert lengths[0] < lengths[-1]
    assert sorted(len(sample.tokens) for sample in arrived) == [len(sample.tokens) for sample in arrived]
    assert model.rows_per_step[1:] == [sum(n > step for n in lengths) for step in range(1, lengths[-1])]


def test_tokens_stream_in_order_and_spell_the_text():
    events = []
    decode = lambda tokens: "".join(chr(97 + token % 26) for token in tokens)  # noqa: E731
    engine, _ = make_engine(detokenizer=Detokenizer(decode), on_token=events.append)
    samples = run(engine, [np.arange(5), np.arange(7)], SamplingParams(n=2, max_new_tokens=5, stop=("ab", "q")))
    for sample in samples:
        mine = [e for e in events if (e.prompt_index, e.index) == (sample.prompt_index, sample.index)]
        assert [event.token for event in mine] == sample.tokens
        assert "".join(event.text for event in mine) == sample.text
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [sample.finish_reason]


def test_text_held_back_is_streamed_when_a_function_ends_the_sample():
    events = []
    engine, _ = make_engine(detokenizer=Detokenizer(lambda tokens: "a" * len(tokens)), on_token=events.append)
    params = SamplingParams(max_new_tokens=9, stop=("aaaaaaa", lambda tokens, text: len(tokens) == 4))
    (sample,) = run(engine, [np.arange(5)], params)
    assert sample.finish_reason == "stop" and len(sample.tokens) == 4
    assert "".join(event.text for event in events) == sample.text == "aaaa"


def test_one_new_token_needs_no_page_of_its_own():
    engine, _ = make_engine(num_pages=2, page_size=4)
    samples = run(engine, [np.arange(8)], SamplingParams(n=50, max_new_tokens=1))
    assert len(samples) == 50


def test_parameters_may_differ_between_prompts():
    params = [
        SamplingParams(n=2, temperature=0, max_new_tokens=4),
        SamplingParams(n=1, top_k=5, max_new_tokens=7, seed=4),
    ]
    params += [SamplingParams(n=1, repetition_penalty=1.5, max_new_tokens=5)]
    prompts = [np.arange(9), np.arange(9), np.arange(12)]
    engine, _ = make_engine()
    samples = engine.run(Request(i, p, own) for i, (p, own) in enumerate(zip(prompts, params, strict=True)))
    for sample in samples:
        assert sample.tokens == alone(prompts[sample.prompt_index], params[sample.prompt_index], sample.index)


class TestBeams:
    @pytest.mark.parametrize(
        ("page_size", "num_beams", "tokens"), [(1, 1, 8), (4, 2, 8), (1, 5, 8), (4, 5, 8), (16, 8, 70)]
    )
    def test_beams_are_those_of_an_exhaustive_replay(self, num_beams, page_size, tokens):
        """In 70 tokens chains of nodes that short-lived beams have left are copied."""
        stops = (1, 2) if tokens == 8 else ()
        params = BeamParams(num_beams, num_return_sequences=num_beams, max_new_tokens=tokens, stop_token_ids=stops)
        prompts = random_prompts(7, count=5)
        engine, _ = make_engine(page_size=page_size)
        samples = run(engine, prompts, params)
        assert_all_given_back(engine)
        assert (engine.report.kv_bytes_copied > 0) == (tokens > 8)
        for index, prompt in enumerate(prompts):
            expected = beams_alone(prompt, params)
            mine = [sample for sample in samples if sample.prompt_index == index]
            assert [tuple(sample.tokens) for sample in mine] == [beam.tokens for beam in expected]
            assert [sample.score for sample in mine] == [beam.score for beam in expected]

    @pytest.mark.parametrize("num_return_sequences", [1, 4])
    def test_a_plain_batch_would_compute_every_beam_whatever_is_returned(self, num_return_sequences):
        engine, _ = make_engine()
        run(engine, [np.arange(9)], BeamParams(4, num_return_sequences, max_new_tokens=7))
        assert engine.report.tokens_plain_batch == 4 * (9 + 6)
        assert engine.report.tokens_computed == 9 + 4 * 6

    def test_a_small_budget_makes_searches_wait(self):
        params = BeamParams(3, max_new_tokens=5)
        prompts = [np.arange(6), np.arange(1, 9), np.arange(6)]
        engine, _ = make_engine(num_pages=20, page_size=1)
        few = run(engine, prompts, params)
        many = run(make_engine(page_size=1)[0], prompts, params)
        assert [s.tokens for s in few] == [s.tokens for s in many]


class TestFailure:
    def test_a_budget_too_small_for_one_sequence_is_refused_before_anything_runs(self):
        engine, model = make_engine(num_pages=3, page_size=4)
        with pytest.raises(KVBudgetTooSmall, match=r"prompt 1 .* needs KV for 20 tokens .* holds 12 tokens"):
            run(engine, [np.arange(2), np.arange(12)], SamplingParams(max_new_tokens=9))
        assert not model.rows_per_step

    @pytest.mark.parametrize("params", [SamplingParams(n=3, max_new_tokens=9), BeamParams(3, max_new_tokens=9)])
    def test_when_the_model_fails_every_page_comes_back(self, params):
        engine, model = make_engine()
        steps = 0

        def failing(step):
            nonlocal steps
            steps += 1
            if steps == 4:
                raise RuntimeError("out of order")
            return model(step)

        engine.runner.model = failing
        with pytest.raises(RuntimeError, match="out of order"):
            run(engine, random_prompts(4), params)
        assert_all_given_back(engine)

    @pytest.mark.parametrize("fails_at", [0, 2, 4])
    def test_when_a_logits_processor_cannot_be_made_every_page_comes_back(self, fails_at):
        made = []

        def make():
            if len(made) == fails_at:
                raise RuntimeError("not this one")
            made.append(0)
            return lambda ids, logits: logits

        engine, _ = make_engine()
        with pytest.raises(RuntimeError, match="not this one"):
            run(engine, random_prompts(4), SamplingParams(n=3, max_new_tokens=9, logits_processors=make))
        assert_all_given_back(engine)

    def test_after_an_interrupt_what_finished_was_delivered(self):
        kept = []
        engine, _ = make_engine()

        def on_sample(sample):
            kept.append(sample)
            if len(kept) == 3:
                raise KeyboardInterrupt

        engine.options["on_sample"] = on_sample
        with pytest.raises(KeyboardInterrupt):
            run(engine, random_prompts(4), SamplingParams(n=2, max_new_tokens=4))
        assert len(kept) == 3
        assert_all_given_back(engine)

    def test_an_interrupt_in_the_midst_of_a_change_of_the_tree_leaves_the_engine_usable(self):
        class Interrupted(PrefixTree):
            def mark_computed(self, nodes, computed):
                super().mark_computed(nodes, computed)
                if len(self.nodes()) > 9:
                    self.allocator.allocate(3)  # pages that no node has yet
                    raise KeyboardInterrupt

        params, prompts = SamplingParams(n=3, max_new_tokens=9), random_prompts(4)
        expected = run(make_engine()[0], prompts, params)
        plain, _ = make_engine()
        store = KVStore(plain.store.pool)
        store.tree = Interrupted(4096, 4)
        store.cache = PrefixCache(store.tree)
        engine = ReportingEngine(plain.runner, store)
        with pytest.raises(KeyboardInterrupt):
            run(engine, prompts, params)
        assert_all_given_back(engine)
        assert run(engine, prompts, params) == expected

    def test_a_prefill_chunk_below_one_is_refused(self):
        with pytest.raises(ValueError, match="prefill_chunk must be at least 1"):
            make_engine(prefill_chunk=0)


def test_equal_prompts_draw_from_streams_of_their_occurrence():
    params, prompt = SamplingParams(n=2, max_new_tokens=12, seed=5), list(range(20))
    engine, _ = make_engine()
    samples = engine.run([Request(0, prompt, params), Request(1, prompt, params, 1)])
    assert [s.tokens for s in samples[:2]] == [alone(prompt, params, index) for index in range(2)]
    assert not any(s.tokens in [t.tokens for t in samples[:2]] for s in samples[2:])


@pytest.mark.parametrize("pace", [Pace(), Pace(ahead=2, slack=16)])
def test_samples_that_are_not_kept_are_gone_once_they_are_given(pace):
    params, prompts = SamplingParams(n=3, max_new_tokens=12, seed=5, stop_token_ids=(3, 4)), random_prompts(5)
    kept = run(make_engine(pace=pace)[0], prompts, params)
    given, alive, most = [], [], 0

    def take(sample):
        nonlocal most
        given.append((sample.prompt_index, sample.index, sample.tokens))
        alive.append(weakref.ref(sample))
        most = max(most, sum(one() is not None for one in alive))

    engine, _ = make_engine(pace=pace, return_samples=False, on_sample=take)
    assert run(engine, prompts, params) == []
    assert sorted(given) == [(s.prompt_index, s.index, s.tokens) for s in kept]
    assert engine.report.samples == len(kept)
    assert not [one for one in alive if one() is not None]
    if pace.ahead > 1:
        assert most <= 2, "a step at a time, not a whole decode"
