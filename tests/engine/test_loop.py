"""The loop of a call, step by step: what a reader has to read to follow a token."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import prefixkit
from prefixkit.engine.call import Call
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.request import Request, Sample
from prefixkit.runners.batch import Batch, Pace
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.expected import alone, assert_all_given_back, random_prompts
from prefixkit.testing.fake_model import make_engine as make_fake_engine
from prefixkit.testing.tiny import tiny_llama

PACKAGE = Path(prefixkit.__file__).parent
ABOVE_RUNNERS = ("engine", "models", "session", "api.py")


def files_of(action: Any) -> set[Path]:
    """The files of prefixkit whose functions run in ``action``."""
    found: set[Path] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        found.add(Path(frame.f_code.co_filename))

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return {path for path in found if path.is_relative_to(PACKAGE)}


def test_a_decode_step_of_one_sample_runs_through_few_files() -> None:
    """Above the runners: what one reads to follow a token."""
    model = prefixkit.patch(tiny_llama())
    requests = [Request(0, np.arange(5, 40), SamplingParams(max_new_tokens=20, stop_token_ids=()))]
    loop = make_engine(model, requests).loop(Call())
    loop.start(requests)
    for _ in range(5):
        loop.step()
    files = {path for path in files_of(loop.step) if path.relative_to(PACKAGE).parts[0] in ABOVE_RUNNERS}
    loop.end()
    assert 3 <= len(files) <= 8, sorted(path.name for path in files)
    assert sum(len(path.read_text().splitlines()) for path in files) <= 1500


def test_steps_by_hand_give_the_samples_of_a_run() -> None:
    params, prompts = SamplingParams(n=2, max_new_tokens=6, seed=3), random_prompts(2)
    engine, _ = make_fake_engine()
    loop = engine.loop(Call())
    loop.start([Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    found = []
    while not loop.scheduler.idle:
        found += loop.step()
    loop.end()
    assert len(found) == 2 * len(prompts)
    for sample in found:
        assert sample.tokens == alone(prompts[sample.prompt_index], params, sample.index)
    assert engine.store.tree.pages_held() == 0


def test_a_call_that_is_dropped_in_its_midst_gives_every_page_back() -> None:
    engine, _ = make_fake_engine()
    loop = engine.loop(Call())
    params = SamplingParams(n=3, max_new_tokens=9)
    loop.start([Request(i, prompt, params) for i, prompt in enumerate(random_prompts(1))])
    for _ in range(4):
        loop.step()
    assert engine.store.tree.pages_held() > 0
    loop.end()
    assert engine.store.tree.pages_held() == 0


def test_samples_that_wait_start_while_steps_are_under_way() -> None:
    params, prompts = SamplingParams(n=24, max_new_tokens=30, seed=1, stop_token_ids=(1, 2)), random_prompts(1)[:2]
    requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
    engine, _ = make_fake_engine(pace=Pace(ahead=2, slack=16, waited_for=2), most_running=16)
    loop, found, ahead = engine.loop(Call()), list[Sample](), 0
    loop.start(requests)
    while not loop.scheduler.idle:
        found += loop.step()
        assert len(loop.scheduler.runs) <= 16
        ahead = max(ahead, len(loop.scheduler.started))
    loop.end()
    assert ahead > 1
    assert len(found) == 48
    for sample in found:
        assert sample.tokens == alone(prompts[sample.prompt_index], params, sample.index)
    assert engine.store.tree.pages_held() == 0


def test_samples_started_ahead_are_given_back_with_a_call_that_is_dropped() -> None:
    params = SamplingParams(n=24, max_new_tokens=30, seed=1, stop_token_ids=(1, 2))
    engine, _ = make_fake_engine(pace=Pace(ahead=2, slack=16, waited_for=2), most_running=16)
    loop = engine.loop(Call())
    loop.start([Request(0, random_prompts(1)[0], params)])
    while not loop.scheduler.started:
        loop.step()
    loop.end()
    assert_all_given_back(engine)


def prompts_computed_before_the_first_run(prefill_chunk: int = 16, **options: Any) -> int:
    """How many of eight prompts of 12 tokens have KV when the first run starts."""
    engine, _ = make_fake_engine(prefill_chunk=prefill_chunk, **options)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(100 * i, 100 * i + 100, 12) for i in range(1, 9)]
    params = SamplingParams(n=2, max_new_tokens=4, seed=3)
    loop, found = engine.loop(Call(on_token=options.get("on_token"))), list[Sample]()
    loop.start([Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    while not loop.scheduler.runs:
        found += loop.step()
    computed = sum(state.computed for state in loop.scheduler.in_flight)
    while not loop.scheduler.idle:
        found += loop.step()
    loop.end()
    assert len(found) == 16
    for sample in found:
        assert sample.tokens == alone(prompts[sample.prompt_index], params, sample.index)
    return computed


def test_prompts_are_computed_before_samples_start_where_all_fit() -> None:
    """A step of prompts alone samples nothing: the host need not wait for it before it launches the next one."""
    assert prompts_computed_before_the_first_run() == 8


def test_samples_start_at_once_where_prompts_take_many_steps() -> None:
    assert prompts_computed_before_the_first_run(prefill_chunk=6) == 8
    assert prompts_computed_before_the_first_run(prefill_chunk=5) == 1


def test_samples_start_earlier_where_they_fill_all_slots_or_a_listener_waits_for_tokens() -> None:
    assert 1 <= prompts_computed_before_the_first_run(most_running=2) <= 3
    assert 1 <= prompts_computed_before_the_first_run(on_token=lambda event: None) <= 2


def test_a_full_cache_makes_room_for_as_many_tokens_at_once_as_are_looked_ahead() -> None:
    """When a batch runs out of pages, its tokens join the tree, and rows, plan and parameters are made anew."""
    policy, params = MemoryPolicy(headroom=16), SamplingParams(n=8, max_new_tokens=33, stop_token_ids=())
    engine, _ = make_fake_engine(110, pace=Pace(ahead=2, slack=16), policy=policy, retain_samples=True)
    launches = []
    launch = engine.runner.launch

    def counted(batch: Batch) -> None:
        launches.append(batch)
        launch(batch)

    engine.runner.launch = counted  # type: ignore[method-assign]
    counts = []
    for turn in range(6):
        launches.clear()
        samples = engine.run([Request(0, np.arange(20) + 20 * turn, params)])
        assert [one.tokens for one in samples] == [alone(np.arange(20) + 20 * turn, params, i) for i in range(8)]
        counts.append(len(launches))
    assert engine.report.tokens_evicted > 0
    assert counts[0] == 2, "the prompt, and all steps"
    assert max(counts) <= 4, "at least 16 steps between two launches"


def test_an_interrupt_before_counters_are_read_is_raised_as_it_is() -> None:
    made, _ = make_fake_engine()
    counters = made.runner.counters

    def interrupted() -> dict[str, float]:
        made.runner.counters = counters  # type: ignore[method-assign]
        raise KeyboardInterrupt

    made.runner.counters = interrupted  # type: ignore[method-assign]
    request, params = random_prompts(1)[0], SamplingParams(n=2, max_new_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        made.run([Request(0, request, params)])
    samples = made.run([Request(0, request, params)])
    assert [one.tokens for one in samples] == [alone(request, params, one.index) for one in samples]
    assert_all_given_back(made)
