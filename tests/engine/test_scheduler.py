"""Admission: by what is needed now, in a fair order; prompts stay in the prefix cache."""

import sys

import numpy as np
import pytest

from prefixkit.engine.call import Call
from prefixkit.engine.memory import check_fits, lookahead_pages, pages_per_run
from prefixkit.engine.policy import EngineSettings, MemoryPolicy
from prefixkit.engine.request import BeamParams, Request
from prefixkit.engine.request_state import RequestState
from prefixkit.engine.scheduler import (
    Scheduler,
)
from prefixkit.kv.budget import Budget, KVBudgetTooSmall
from prefixkit.kv.kv_pool import KVPool
from prefixkit.kv.store import KVStore
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.fake_model import make_engine
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.kv_specs import spec_of_alike
from prefixkit.tree.radix import PrefixTree


def request(index, tokens, **params):
    return Request(index, np.array(tokens), SamplingParams(**params))


def scheduler_over(num_pages, page_size=4, **policy):
    store = KVStore(KVPool(spec_of_alike(1, 1, 1), num_pages, page_size))
    return Scheduler(store, Call(), EngineSettings(policy=MemoryPolicy(**policy)))


def in_flight(scheduler):
    return [state.request.prompt_index for state in scheduler.in_flight]


def compute(scheduler):
    """Say that all tokens have KV."""
    nodes = scheduler.store.tree.nodes()
    scheduler.store.tree.mark_computed(nodes, [node.length for node in nodes])


def test_pages_of_a_sample_leave_out_the_last_token_which_needs_no_kv():
    assert [pages_per_run(SamplingParams(max_new_tokens=t), 4) for t in (1, 2, 5, 6)] == [0, 1, 1, 2]


def test_pages_of_a_search_are_those_of_its_beams_one_by_one_with_room_for_their_next_tokens():
    of = [pages_per_run(BeamParams(3, max_new_tokens=t), 4) for t in (1, 2, 4, 6, 17)]
    assert of == [0, 3, 9, 12, 18]


def test_growth_is_what_the_next_tokens_take():
    of = [lookahead_pages(SamplingParams(max_new_tokens=t), 4, 8) for t in (1, 2, 5, 6, 9, 10, 1000)]
    assert of == [0, 1, 1, 2, 2, 2, 2]
    assert lookahead_pages(BeamParams(3, max_new_tokens=6), 4, 1) == 3


def test_prompts_that_share_are_admitted_one_after_the_other():
    scheduler = scheduler_over(1000)
    scheduler.submit([request(0, [5, 1]), request(1, [300, 2]), request(2, [5, 1, 7]), request(3, [5])])
    scheduler.admit(0)
    assert in_flight(scheduler) == [3, 0, 2, 1]


def test_what_comes_later_waits_whatever_its_tokens_are():
    scheduler = scheduler_over(1000)
    scheduler.submit([request(0, [5, 1]), request(1, [5, 2])])
    scheduler.submit([request(2, [1])])
    scheduler.admit(0)
    assert in_flight(scheduler) == [0, 1, 2]


@pytest.mark.parametrize(("lookahead", "admitted"), [(0, 2), (1, 1), (3, 1), (4, 0)])
def test_a_prompt_is_admitted_beside_the_next_tokens_of_what_runs(lookahead, admitted):
    """Each of two pages, and one for its first sample's next tokens."""
    scheduler = scheduler_over(num_pages=6, headroom=4)
    scheduler.in_flight.append(running := RequestState(request(9, [1]), 0, running=1))
    running.prompt = scheduler.store.tree.insert([1])
    scheduler.store.tree.release(running.prompt)
    scheduler.submit([request(i, [i + 2] * 8, n=5, max_new_tokens=100) for i in range(2)])
    scheduler.admit(lookahead)
    assert len(scheduler.in_flight) - 1 == admitted


def test_a_prompt_that_does_not_fit_leaves_no_trace():
    scheduler = scheduler_over(num_pages=5)
    scheduler.submit([request(0, range(8), max_new_tokens=9), request(1, [*range(6), 99], max_new_tokens=9)])
    scheduler.admit(0)
    assert len(scheduler.in_flight) == 1
    assert scheduler.store.tree.snapshot().num_nodes == 1
    check_tree(scheduler.store.tree)


def test_prompts_stay_in_the_prefix_cache_until_their_pages_are_needed():
    scheduler = scheduler_over(num_pages=6)
    scheduler.submit([request(0, [*range(10), 50], max_new_tokens=9)])
    scheduler.admit(0)
    compute(scheduler)
    scheduler.retire(scheduler.in_flight[0])
    assert scheduler.store.tree.snapshot().num_nodes == 0
    scheduler.submit([request(1, [*range(10), 60], max_new_tokens=9)])
    scheduler.admit(0)
    assert scheduler.store.cache.tokens_hit == 10
    (state,) = scheduler.in_flight
    assert scheduler.store.tree.snapshot().computed.tolist() == [10, 0]
    compute(scheduler)
    scheduler.retire(state)
    scheduler.submit([request(2, range(100, 115), max_new_tokens=9)])
    scheduler.admit(0)
    assert in_flight(scheduler) == [2]
    assert scheduler.store.tree.match([*range(10), 60]).length == 0
    scheduler.close()
    check_tree(scheduler.store.tree)
    assert scheduler.store.tree.allocator.free == 6


def test_a_prompt_is_inserted_whole_where_making_room_for_it_merges_what_it_shares():
    scheduler = scheduler_over(num_pages=7)
    head = list(range(6))
    for number, tail in enumerate(([10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25])):
        scheduler.submit([request(number, head + tail, max_new_tokens=1)])
        scheduler.admit(0)
        compute(scheduler)
    for state in scheduler.in_flight[::-1]:
        scheduler.retire(state)
    scheduler.submit([request(2, [*head, 10, 11, *range(40, 49)], max_new_tokens=1)])
    scheduler.admit(0)
    assert scheduler.store.tree.match([*head, 20]).length == 6, "the other was evicted"
    (state,) = scheduler.in_flight
    assert state.sequence.tokens().tolist() == state.request.tokens.tolist()
    check_tree(scheduler.store.tree)


def test_an_equal_prompt_in_flight_shares_its_logits():
    scheduler = scheduler_over(num_pages=40)
    scheduler.submit([request(0, range(8), max_new_tokens=9)])
    scheduler.admit(0)
    scheduler.in_flight[0].first_logits = "logits"
    scheduler.submit([request(1, range(8), max_new_tokens=9)])
    scheduler.admit(0)
    assert [state.first_logits for state in scheduler.in_flight] == ["logits", "logits"]


def test_what_is_requeue_goes_first_again():
    scheduler = scheduler_over(num_pages=40)
    scheduler.submit([request(i, [i, 1, 2], max_new_tokens=9) for i in range(3)])
    scheduler.admit(0)
    compute(scheduler)
    scheduler.requeue(scheduler.in_flight[1])
    assert in_flight(scheduler) == [0, 2]
    scheduler.submit([request(3, [0, 0], max_new_tokens=9)])
    scheduler.admit(0)
    assert in_flight(scheduler) == [0, 2, 1, 3]


def test_the_refusal_names_the_need_in_mib_and_tokens():
    with pytest.raises(
        KVBudgetTooSmall, match=r"prompt 7 .* needs KV for 20 tokens \(20\.00 MiB\).*holds 12 tokens \(12\.00 MiB\)"
    ):
        check_fits([request(7, range(11), max_new_tokens=9)], Budget(PrefixTree(3, 4), 2**20, []))


@pytest.mark.parametrize("most", [1, 5, 7])
def test_no_more_run_at_once_than_asked(most):
    engine, model = make_engine(most_running=most)
    params = SamplingParams(n=4, max_new_tokens=5, seed=5)
    samples = engine.run(Request(i, np.arange(5 + i), params) for i in range(3))
    unbounded, _ = make_engine()
    assert samples == unbounded.run(Request(i, np.arange(5 + i), params) for i in range(3))
    assert max(model.rows_per_step) <= most + 7
    assert len(samples) == 12


def test_at_least_one_must_run():
    with pytest.raises(ValueError, match="most_running must be at least 1, got 0"):
        make_engine(most_running=0)


class TestWaiting:
    """Whether a prompt fits is decided by reading the tree."""

    def test_a_prompt_that_does_not_fit_is_not_inserted(self):
        scheduler = scheduler_over(num_pages=5)
        scheduler.submit([request(0, range(8), max_new_tokens=9), request(1, [*range(6), 99], max_new_tokens=9)])
        scheduler.admit(0)
        snapshot, version = scheduler.store.tree.snapshot(), scheduler.store.tree.version
        for _ in range(3):
            scheduler.admit(0)
        assert scheduler.store.tree.version == version
        assert scheduler.store.tree.snapshot() is snapshot

    def test_steps_while_a_prompt_waits_are_not_planned_anew(self):
        """A plan for the prompt and one for its samples, each time, and as many where the pool holds both at once."""
        prompts = [[*range(8), 40 + index] for index in range(2)]
        plans = {}
        for num_pages in (16, 4096):
            engine, model = make_engine(num_pages=num_pages, page_size=4)
            engine.run(request(index, prompt, max_new_tokens=41) for index, prompt in enumerate(prompts))
            plans[num_pages] = engine.report.plans, len(model.rows_per_step)
        assert plans == {4096: (2, 41), 16: (4, 82)}


def test_calls_of_functions_grow_with_the_prompts():
    """Counted, not timed: comparisons of all prompts with each other would make them grow with the square."""

    def calls(count):
        scheduler = scheduler_over(40 * count)
        scheduler.submit(request(index, [*range(9), index % 50, index], max_new_tokens=9) for index in range(count))
        return count_calls(lambda: scheduler.admit(0)) + count_calls(
            lambda: [scheduler.retire(one) for one in scheduler.in_flight.copy()]
        )

    assert calls(800) < 4.5 * calls(200)


def count_calls(action):
    """Calls and returns of Python functions, generators' items included, while ``action`` runs."""
    count = 0

    def seen(*_):
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count
