"""Under memory pressure requests take turns, and every sample is what it is without pressure."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from prefixkit.agreement import Alone
from prefixkit.engine.call import Call
from prefixkit.engine.memory import check_fits, pages_per_run
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.preemption import Rate
from prefixkit.engine.request import BeamParams, Request
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.runners.batch import STEP_BY_STEP, Pace
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back
from prefixkit.testing.fake_model import VOCAB, make_engine
from tests.covering import pairwise_cover

AHEAD = Pace(2, 16, waited_for=8)


def prompts_of(seed, count=6, head=20):
    print("seed", seed)
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, head)
    return [np.concatenate([shared, rng.integers(0, VOCAB, rng.integers(1, 30))]) for _ in range(count)]


def requests_of(seed, n=4, tokens=28, **params):
    return [
        Request(i, prompt, SamplingParams(n=n, max_new_tokens=tokens, seed=seed + i, stop_token_ids=(3,), **params))
        for i, prompt in enumerate(prompts_of(seed))
    ]


@cache
def searches_of(seed):
    return [Request(i, prompt, BeamParams(2 + i, 2, max_new_tokens=28)) for i, prompt in enumerate(prompts_of(seed, 4))]


@cache
def without_pressure(make, seed, **params):
    """Requests, and what is found where all of them fit at once."""
    requests = make(seed, **params)
    roomy, _ = make_engine(num_pages=10_000, page_size=4)
    expected = roomy.run(requests)
    assert roomy.report.preempted_recomputed == roomy.report.preempted_swapped == 0
    return requests, expected


PACES = {"step by step": STEP_BY_STEP, "ahead": AHEAD}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("page_size", "pace", "how"), pairwise_cover(product((1, 4, 16), PACES, ("swap", "recompute", "auto")))
)
def test_samples_are_those_without_pressure(page_size, pace, how):
    """In a fifth of the pages that everything would need at once."""
    requests, expected = without_pressure(requests_of, 1)
    policy = MemoryPolicy(preemption=how, headroom=4)
    engine, _ = make_engine(num_pages=-(-160 // page_size), page_size=page_size, pace=PACES[pace], policy=policy)
    found = engine.run(requests)
    assert [(s.prompt_index, s.index, s.tokens, s.finish_reason) for s in found] == [
        (s.prompt_index, s.index, s.tokens, s.finish_reason) for s in expected
    ]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    report = engine.report
    assert report.preempted_swapped + report.preempted_recomputed > 0
    assert report.kv_bytes_swapped > 0 or not report.preempted_swapped
    assert how != "swap" or report.kv_bytes_swapped > 0
    assert how != "recompute" or not report.kv_bytes_swapped
    assert_all_given_back(engine)


def test_a_pool_that_just_holds_one_sample_at_a_time_is_enough():
    requests = requests_of(3, n=2)
    largest = max(len(request.tokens) for request in requests)
    engine, _ = make_engine(num_pages=-(-largest // 4) + 10, page_size=4, pace=AHEAD)
    for sample in engine.run(requests):
        request = requests[sample.prompt_index]
        assert sample.tokens == alone(request.tokens, request.params, sample.index)
    assert_all_given_back(engine)


@pytest.mark.parametrize("how", ["swap", "recompute"])
@pytest.mark.parametrize("num_pages", [10, 11, 13])
def test_samples_that_are_alike_come_back_with_room_for_tokens_of_their_own(num_pages, how):
    """They share what they had in the tree; from there on each takes pages."""
    prompt = np.arange(17)
    asked = [(prompt, SamplingParams(n=7, temperature=0.0, max_new_tokens=9))]
    asked.append((prompt[:-1], SamplingParams(n=5, temperature=0.0, max_new_tokens=6)))
    engine, _ = make_engine(num_pages, 4, policy=MemoryPolicy(preemption=how, headroom=0))
    for sample in engine.run(Request(i, *each) for i, each in enumerate(asked)):
        assert sample.tokens == alone(*asked[sample.prompt_index], sample.index)
    assert_all_given_back(engine)


@pytest.mark.parametrize(
    ("num_pages", "chunk", "priorities"), [(17, 1, (0, 1, 2)), (24, 1, (0, 1, 2)), (26, 5, (2, 1, 0))]
)
def test_samples_that_are_preempted_while_they_are_computed_again(num_pages, chunk, priorities):
    """Of their tokens not all have KV then, and only what has is swapped."""
    asked = [(np.arange(6) + i, SamplingParams(n=3, max_new_tokens=12, seed=i)) for i in range(3)]
    policy = MemoryPolicy(preemption="swap", headroom=0, patience=2)
    engine, _ = make_engine(num_pages, 1, policy=policy, prefill_chunk=chunk)
    for sample in engine.run(Request(i, *asked[i], priority=priorities[i]) for i in range(3)):
        assert sample.tokens == alone(*asked[sample.prompt_index], sample.index)
    assert_all_given_back(engine)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("page_size", "headroom", "how"),
    [(1, 64, "swap"), (4, 0, "swap"), (16, 8, "recompute")],
)
def test_a_pool_of_just_what_the_check_asks_for_is_enough(page_size, headroom, how):
    """Searches that were preempted late have much to bring back, and little room beside it."""
    for requests, expected in (without_pressure(searches_of, 3), without_pressure(requests_of, 3, n=2)):
        pages = max(-(-len(one.tokens) // page_size) + pages_per_run(one.params, page_size) for one in requests)
        engine, _ = make_engine(pages, page_size, policy=MemoryPolicy(preemption=how, headroom=headroom))
        assert [s.tokens for s in engine.run(requests)] == [s.tokens for s in expected]
        assert_all_given_back(engine)


@pytest.mark.parametrize("how", ["swap", "recompute"])
def test_beams_and_samples_are_preempted_alike(how):
    samples = requests_of(5, n=3, tokens=24)
    searches = [
        Request(100 + i, prompt, BeamParams(3, 2, max_new_tokens=12, stop_token_ids=(3,)))
        for i, prompt in enumerate(prompts_of(6, 6))
    ]
    roomy, _ = make_engine(num_pages=10_000, page_size=4)
    expected = roomy.run([*samples, *searches])
    engine, _ = make_engine(num_pages=80, page_size=4, policy=MemoryPolicy(preemption=how, headroom=4))
    found = engine.run([*samples, *searches])
    assert [(s.prompt_index, s.index, s.tokens) for s in found] == [
        (s.prompt_index, s.index, s.tokens) for s in expected
    ]
    np.testing.assert_array_equal([s.score or 0 for s in found], [s.score or 0 for s in expected])
    assert engine.report.preempted_swapped + engine.report.preempted_recomputed > 0
    assert_all_given_back(engine)


@pytest.mark.parametrize("headroom", [0, 1])
@pytest.mark.parametrize("pace", [STEP_BY_STEP, AHEAD], ids=["step by step", "ahead"])
def test_what_comes_back_finds_room_for_its_next_token(pace, headroom):
    """With the least headroom that there is, and prompts of a few tokens: nothing is left beside it."""
    requests = [Request(i, [i, 9], SamplingParams(n=4, max_new_tokens=12, seed=i)) for i in range(4)]
    roomy, _ = make_engine(num_pages=10_000, page_size=4)
    engine, _ = make_engine(
        num_pages=26, page_size=1, pace=pace, policy=MemoryPolicy(preemption="swap", headroom=headroom)
    )
    assert [s.tokens for s in engine.run(requests)] == [s.tokens for s in roomy.run(requests)]
    assert engine.report.preempted_swapped > 0
    assert_all_given_back(engine)


@pytest.mark.parametrize(("page_size", "num_pages", "seed"), [(4, 5, 22), (8, 4, 184)])
def test_what_the_cache_has_kept_of_a_sample_may_end_anywhere_in_a_page(page_size, num_pages, seed):
    """Its next tokens then begin a page sooner than if its first one had."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(0, VOCAB, 2 * page_size)
    policy = MemoryPolicy(preemption="recompute", headroom=0)
    for _ in range(5):
        requests = [
            Request(
                i,
                [*head[: rng.integers(1, 2 * page_size)], *rng.integers(0, VOCAB, rng.integers(0, page_size))],
                SamplingParams(n=rng.integers(1, 6), max_new_tokens=rng.integers(2, 2 * page_size), seed=i),
            )
            for i in range(3)
        ]
        roomy, _ = make_engine(num_pages=10_000, page_size=page_size)
        engine, _ = make_engine(num_pages=num_pages, page_size=page_size, policy=policy)
        try:
            check_fits(requests, engine.store.budget())
        except KVBudgetTooSmall:
            continue
        assert [s.tokens for s in engine.run(requests)] == [s.tokens for s in roomy.run(requests)]
        assert_all_given_back(engine)


@pytest.mark.parametrize("num_pages", [13, 17, 22])
def test_a_prompt_that_nothing_else_holds_goes_to_host_memory_with_its_samples(num_pages):
    """It is evicted while others run, and comes back by a copy: no token of a sample is computed a second time."""
    engine, model = make_engine(num_pages, page_size=4, policy=MemoryPolicy(preemption="swap", headroom=4))
    params = {"max_new_tokens": 24, "stop_token_ids": ()}
    requests = [Request(i, [i] * 20, SamplingParams(n=2, seed=i, **params)) for i in range(3)]
    assert len(engine.run(requests)) == 6
    assert engine.report.preempted_swapped > 0
    assert engine.report.preempted_recomputed == 0
    assert max(times for tokens, times in model.computed.items() if len(tokens) > 21) == 1


@pytest.mark.parametrize(("num_pages", "counts", "again"), [(40, (2, 2, 3), 0), (24, (2, 2, 3), 1), (20, (3, 2, 2), 2)])
def test_swapped_kv_is_of_no_use_where_what_it_shared_was_evicted_and_is_counted_so(num_pages, counts, again):
    """The second request goes to host memory without the head, which the first one holds at that time."""
    policy = MemoryPolicy(preemption="swap", headroom=4, patience=4)
    engine, _ = make_engine(num_pages, page_size=4, policy=policy)
    asked = zip(([*[1] * 20, 2], [*[1] * 20, 3], [4] * 30), counts, (1, 0, 0), strict=True)
    requests = [
        Request(i, prompt, SamplingParams(n=n, seed=i, max_new_tokens=24, stop_token_ids=()), priority=priority)
        for i, (prompt, n, priority) in enumerate(asked)
    ]
    assert len(engine.run(requests)) == 7
    assert engine.report.preempted_recomputed == again
    assert engine.report.preempted_swapped > 0


def test_the_time_of_steps_that_the_host_did_not_wait_for_counts_at_the_next_wait():
    engine, _ = make_engine(num_pages=40, page_size=4)
    preemption = engine.loop(Call()).scheduler.preemption
    preemption.computing = Rate(0.0, 0.0)
    for _ in range(3):
        preemption.count_step(100, 0.25, waited=False)
    assert preemption.computing.seconds_for(100) == 0
    preemption.count_step(0, 1.25, waited=True)  # samples first tokens
    preemption.count_step(0, 9.0, waited=True)  # such a step by itself computes no prompt
    assert preemption.computing.seconds_for(300) == 2.0


def test_where_host_memory_is_full_kv_is_computed_again():
    requests = requests_of(7)
    engine, _ = make_engine(num_pages=60, page_size=4, policy=MemoryPolicy(preemption="swap", swap_space=0, headroom=4))
    engine.run(requests)
    assert engine.report.preempted_recomputed > 0 and not engine.report.preempted_swapped


def test_stop_functions_and_logits_processors_see_the_same_samples():
    def short(tokens, text):
        return len(tokens) > 20 and tokens[-1] % 7 == 0

    class Odd:
        def __call__(self, ids, logits):
            logits[:, :: 1 + ids.shape[1] % 3] -= 1.0
            return logits

    requests = requests_of(8, n=4, stop=(short,), logits_processors=Odd)
    roomy, _ = make_engine(num_pages=10_000, page_size=4)
    engine, _ = make_engine(num_pages=60, page_size=4, policy=MemoryPolicy(preemption="swap", headroom=4))
    assert [s.tokens for s in engine.run(requests)] == [s.tokens for s in roomy.run(requests)]
    assert engine.report.preempted_swapped > 0


def test_an_error_under_pressure_leaves_nothing_behind():
    class Fails:
        left = 300

        def __call__(self, ids, logits):
            Fails.left -= 1
            if not Fails.left:
                raise ZeroDivisionError
            return logits

    requests = requests_of(9, logits_processors=Fails)
    engine, _ = make_engine(num_pages=60, page_size=4, policy=MemoryPolicy(preemption="swap", headroom=4))
    with pytest.raises(ZeroDivisionError):
        engine.run(requests)
    assert_all_given_back(engine)
    Fails.left = 10**9
    assert len(engine.run(requests)) == 24


class TestOrder:
    def order_of(self, requests, **policy):
        order = []
        engine, _ = make_engine(
            num_pages=24,
            page_size=4,
            policy=MemoryPolicy(**policy),
            return_samples=False,
            on_sample=lambda s: order.append(s),
        )
        engine.run(requests)
        return [sample.prompt_index for sample in order]

    def requests(self, priorities, tokens=28):
        return [
            Request(i, np.array([i + 10, 7, 7, 7]), SamplingParams(max_new_tokens=tokens, seed=i), priority=priority)
            for i, priority in enumerate(priorities)
        ]

    def test_a_higher_priority_goes_first(self):
        found = self.order_of(self.requests([0, 0, 5, 0, 9, 0]))
        assert set(found[:2]) == {4, 2}
        assert found[2:] == [0, 1, 3, 5] or set(found[2:]) == {0, 1, 3, 5}

    def test_what_has_waited_long_goes_before_what_has_a_higher_priority(self):
        """While samples of priority 1 come again and again, the one of priority 0 would wait for all of them."""
        found = self.order_of(self.requests([1, 0, *[1] * 10]), patience=40)
        assert found.index(1) < 8
        assert self.order_of(self.requests([1, 0, *[1] * 10]), patience=10**6)[-1] == 1


def test_rates_come_from_what_was_measured():
    """With a prompt that took an hour a token to compute, copies are cheaper."""
    requests = requests_of(10)
    taken = {}
    for seconds in (1e-12, 3600.0):
        engine, _ = make_engine(num_pages=60, page_size=4, policy=MemoryPolicy(headroom=4))
        engine.store.notes["rate of computing"] = Rate(
            1e15, seconds * 1e15
        )  # what this run measures does not count beside it
        engine.run(requests)
        taken[seconds] = engine.report.preempted_swapped, engine.report.preempted_recomputed
    assert taken[1e-12][0] == 0 < taken[1e-12][1]
    assert taken[3600.0][1] == 0 < taken[3600.0][0]


def test_kv_is_swapped_where_copies_are_cheaper_in_every_process_of_the_model():
    class Beside(Alone):
        def least(self, number):
            return 0  # the other's clock says that they are not

    engine, _ = make_engine(num_pages=60, page_size=4, policy=MemoryPolicy(headroom=4))
    engine.store.notes["rate of computing"], engine.store.agreement = Rate(1e15, 3600e15), Beside()
    engine.run(requests_of(10))
    assert engine.report.preempted_swapped == 0 < engine.report.preempted_recomputed
