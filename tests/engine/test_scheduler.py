"""Admission: reserved pages stay available, and shared prefixes outlive the prompts that brought them."""

import sys

import numpy as np
import pytest

from prefixkit.engine.request import BeamParams, Request
from prefixkit.engine.scheduler import KVBudgetTooSmall, Scheduler, check_fits, pages_per_unit
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.radix import PrefixTree
from tests.engine.fake_model import make_engine
from tests.tree.integrity import check_tree


def request(index, tokens, **params):
    return Request(index, np.array(tokens), SamplingParams(**params))


def scheduler_over(num_pages, page_size=4, reserved=0):
    return Scheduler(PrefixTree(num_pages, page_size), lambda: reserved)


def test_pages_of_a_sample_leave_out_the_last_token_which_needs_no_kv():
    assert [pages_per_unit(SamplingParams(max_new_tokens=t), 4) for t in (1, 2, 5, 6)] == [0, 1, 1, 2]
    assert pages_per_unit(BeamParams(3, max_new_tokens=6), 4) == 15


def test_prompts_that_share_are_admitted_one_after_the_other():
    scheduler = scheduler_over(1000)
    scheduler.submit([request(0, [5, 1]), request(1, [300, 2]), request(2, [5, 1, 7]), request(3, [5])])
    scheduler.admit()
    assert [state.request.prompt_index for state in scheduler.in_flight] == [3, 0, 2, 1]


def test_samples_are_granted_as_far_as_pages_reach_and_the_rest_wait():
    scheduler = scheduler_over(num_pages=8)
    scheduler.submit([request(0, range(8), n=5, max_new_tokens=9), request(1, range(8), n=1, max_new_tokens=9)])
    scheduler.admit()
    (state,) = scheduler.in_flight
    assert (state.granted, state.wanted) == (3, 5)  # 2 pages of prompt and 3 samples of 2 pages
    assert len(scheduler.queue) == 1


def test_pages_reserved_to_running_samples_are_not_granted_again():
    scheduler = scheduler_over(num_pages=8, reserved=5)
    scheduler.submit([request(0, range(4), n=9, max_new_tokens=5)])
    scheduler.admit()
    assert scheduler.in_flight[0].granted == 2


def test_a_prompt_that_does_not_fit_leaves_no_trace():
    scheduler = scheduler_over(num_pages=5)
    scheduler.submit([request(0, range(8), max_new_tokens=9), request(1, [*range(6), 99], max_new_tokens=9)])
    scheduler.admit()
    assert len(scheduler.in_flight) == 1
    assert scheduler.tree.snapshot().num_nodes == 1
    check_tree(scheduler.tree)


def test_what_the_next_prompt_shares_stays_when_a_prompt_retires():
    scheduler = scheduler_over(num_pages=6)
    scheduler.submit([request(0, [*range(10), 50], max_new_tokens=9), request(1, [*range(10), 60], max_new_tokens=9)])
    scheduler.admit()
    first = scheduler.in_flight[0]
    scheduler.tree.mark_computed([first.prompt.node], [11])
    first.started = first.finished = 1
    scheduler.retire(first)
    assert scheduler.tree.match([*range(10), 60]).length == 10
    assert scheduler.tree.snapshot().computed.tolist() == [10]
    scheduler.admit()
    assert [state.request.prompt_index for state in scheduler.in_flight] == [1]
    scheduler.close()
    check_tree(scheduler.tree)
    assert scheduler.tree.allocator.free == 6


def test_an_equal_prompt_inherits_the_logits():
    scheduler = scheduler_over(num_pages=4)
    scheduler.submit([request(0, range(8), max_new_tokens=9), request(1, range(8), max_new_tokens=9)])
    scheduler.admit()
    first = scheduler.in_flight[0]
    first.first_logits = "logits"
    first.started = first.finished = 1
    scheduler.retire(first)
    scheduler.admit()
    assert scheduler.in_flight[0].request.prompt_index == 1
    assert scheduler.in_flight[0].first_logits == "logits"


def test_the_refusal_names_the_need_in_mib_and_tokens():
    with pytest.raises(
        KVBudgetTooSmall, match=r"prompt 7 needs KV for 20 tokens \(20\.0 MiB\).*holds 12 tokens \(12\.0 MiB\)"
    ):
        check_fits([request(7, range(11), max_new_tokens=9)], PrefixTree(3, 4), bytes_per_token=2**20)


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
    with pytest.raises(ValueError, match="most_running must be at least 1 sample, got 0"):
        make_engine(most_running=0)


class TestWaiting:
    """Whether a prompt fits is decided by reading the tree."""

    def test_a_prompt_that_does_not_fit_is_not_inserted(self):
        scheduler = scheduler_over(num_pages=5)
        scheduler.submit([request(0, range(8), max_new_tokens=9), request(1, [*range(6), 99], max_new_tokens=9)])
        scheduler.admit()
        snapshot, version = scheduler.tree.snapshot(), scheduler.tree.version
        for _ in range(3):
            scheduler.admit()
        assert scheduler.tree.version == version
        assert scheduler.tree.snapshot() is snapshot

    def test_steps_while_a_prompt_waits_are_not_planned_anew(self):
        """A plan for the prompt and one for its samples, each time, and as many where the pool holds both at once."""
        prompts = [[*range(8), 40 + index] for index in range(2)]
        plans = {}
        for num_pages in (16, 4096):
            engine, model = make_engine(num_pages=num_pages, page_size=4)
            engine.run(request(index, prompt, max_new_tokens=41) for index, prompt in enumerate(prompts))
            plans[num_pages] = engine.report.plans, len(model.rows_per_step)
        assert plans == {4096: (2, 41), 16: (4, 82)}

    @pytest.mark.parametrize("goes_on", [[], [7], [7, 8, 9]])
    @pytest.mark.parametrize("left", [0, 1, 3, 4, 9])
    def test_reserved_pages_suffice_where_a_prompt_ends_with_a_sample_s_leaf_or_goes_on_below_it(self, goes_on, left):
        """Such a leaf stops growing in place, so its sample may need a page more than before."""
        tree = PrefixTree(64, 4)
        sample = tree.insert(range(5))
        pages_left = lambda: tree.pages_to_extend(sample, left)  # noqa: E731
        scheduler = Scheduler(tree, pages_left, tokens_left=lambda one: left if one is sample else 0)
        scheduler.submit([request(0, [90], max_new_tokens=1)])
        scheduler.admit()

        own_and_one_sample = -(-len(goes_on) // 4) + 1
        needed = own_and_one_sample + -(-left // 4)
        taken = tree.allocator.allocate(tree.allocator.free - needed + 1)
        scheduler.submit([request(1, [*range(5), *goes_on], max_new_tokens=5)])
        scheduler.admit()
        assert len(scheduler.in_flight) == 1
        tree.allocator.release(taken[:1])
        scheduler.admit()
        assert len(scheduler.in_flight) == 2
        assert tree.allocator.free >= pages_left() + 1


class TestManyPrompts:
    """Admission is linear in the prompts: what it does for each does not depend on how many there are."""

    def test_what_runs_is_asked_for_once(self):
        asked = []
        scheduler = Scheduler(PrefixTree(10_000, 4), lambda: asked.append(1) or 0)
        scheduler.submit(request(index, [*range(9), index], n=2, max_new_tokens=9) for index in range(200))
        scheduler.admit()
        assert len(scheduler.in_flight) == 200
        assert len(asked) == 1

    def test_what_runs_is_not_asked_for_when_nothing_waits(self):
        asked = []
        scheduler = Scheduler(PrefixTree(100, 4), lambda: asked.append(1) or 0)
        scheduler.submit([request(0, range(9))])
        for _ in range(5):
            scheduler.admit()
        assert len(asked) == 1

    def test_calls_of_functions_grow_with_the_prompts(self):
        """Counted, not timed: comparisons of all prompts with each other would make them grow with the square."""

        def calls(count):
            scheduler = Scheduler(PrefixTree(20 * count, 4), lambda: 0)
            scheduler.submit(request(index, [*range(9), index % 50, index], max_new_tokens=9) for index in range(count))
            return count_calls(scheduler.admit) + count_calls(
                lambda: [scheduler.retire(one) for one in scheduler.in_flight]
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
