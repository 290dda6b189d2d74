"""Admission: a promise of pages is always kept, and shared prefixes outlive the prompts that brought them."""

import numpy as np
import pytest

from prefixkit.generation.request import BeamParams, Request, SamplingParams
from prefixkit.generation.scheduler import KVBudgetTooSmall, Scheduler, check_fits, common_prefix, pages_per_unit
from prefixkit.tree.radix import PrefixTree
from tests.generation.fake_model import make_engine


def request(index, tokens, **params):
    return Request(index, np.array(tokens), SamplingParams(**params))


def scheduler_over(num_pages, page_size=4, promised=0):
    return Scheduler(PrefixTree(num_pages, page_size), lambda: promised)


def test_pages_of_a_sample_leave_out_the_last_token_which_needs_no_kv():
    assert [pages_per_unit(SamplingParams(max_new_tokens=t), 4) for t in (1, 2, 5, 6)] == [0, 1, 1, 2]
    assert pages_per_unit(BeamParams(3, max_new_tokens=6), 4) == 15


def test_prompts_that_share_are_admitted_one_after_the_other():
    scheduler = scheduler_over(1000)
    scheduler.submit([request(0, [5, 1]), request(1, [300, 2]), request(2, [5, 1, 7]), request(3, [5])])
    scheduler.admit()
    assert [group.request.prompt_index for group in scheduler.groups] == [3, 0, 2, 1]


def test_samples_are_granted_as_far_as_pages_reach_and_the_rest_wait():
    scheduler = scheduler_over(num_pages=8)
    scheduler.submit([request(0, range(8), n=5, max_new_tokens=9), request(1, range(8), n=1, max_new_tokens=9)])
    scheduler.admit()
    (group,) = scheduler.groups
    assert (group.granted, group.wanted) == (3, 5)  # 2 pages of prompt and 3 samples of 2 pages
    assert len(scheduler.queue) == 1


def test_pages_promised_to_running_samples_are_not_granted_again():
    scheduler = scheduler_over(num_pages=8, promised=5)
    scheduler.submit([request(0, range(4), n=9, max_new_tokens=5)])
    scheduler.admit()
    assert scheduler.groups[0].granted == 2


def test_a_prompt_that_does_not_fit_leaves_no_trace():
    scheduler = scheduler_over(num_pages=5)
    scheduler.submit([request(0, range(8), max_new_tokens=9), request(1, [*range(6), 99], max_new_tokens=9)])
    scheduler.admit()
    assert len(scheduler.groups) == 1
    assert scheduler.tree.snapshot().num_nodes == 1
    scheduler.tree.check()


def test_what_the_next_prompt_shares_stays_when_a_prompt_retires():
    scheduler = scheduler_over(num_pages=6)
    scheduler.submit([request(0, [*range(10), 50], max_new_tokens=9), request(1, [*range(10), 60], max_new_tokens=9)])
    scheduler.admit()
    first = scheduler.groups[0]
    scheduler.tree.mark_ready([first.prompt.node], [11])
    first.started = first.finished = 1
    scheduler.retire(first)
    assert scheduler.tree.match([*range(10), 60]).length == 10
    assert scheduler.tree.snapshot().ready.tolist() == [10]
    scheduler.admit()
    assert [group.request.prompt_index for group in scheduler.groups] == [1]
    scheduler.close()
    scheduler.tree.check()
    assert scheduler.tree.allocator.free == 6


def test_an_equal_prompt_inherits_the_logits():
    scheduler = scheduler_over(num_pages=4)
    scheduler.submit([request(0, range(8), max_new_tokens=9), request(1, range(8), max_new_tokens=9)])
    scheduler.admit()
    first = scheduler.groups[0]
    first.first_logits = "logits"
    first.started = first.finished = 1
    scheduler.retire(first)
    scheduler.admit()
    assert scheduler.groups[0].request.prompt_index == 1
    assert scheduler.groups[0].first_logits == "logits"


def test_the_refusal_names_the_need_in_mib_and_tokens():
    with pytest.raises(
        KVBudgetTooSmall, match=r"prompt 7 needs KV for 20 tokens \(20\.0 MiB\).*holds 12 tokens \(12\.0 MiB\)"
    ):
        check_fits([request(7, range(11), max_new_tokens=9)], PrefixTree(3, 4), bytes_per_token=2**20)


@pytest.mark.parametrize(("a", "b", "shared"), [([1, 2, 3], [1, 2, 4], 2), ([1], [2], 0), ([1, 2], [1, 2, 3], 2)])
def test_common_prefix(a, b, shared):
    assert common_prefix(np.array(a), np.array(b)) == shared


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
