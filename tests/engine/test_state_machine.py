"""Random histories of an engine whose prefix cache outlives its calls: whatever happens, samples are as if alone.

``PREFIXKIT_SOAK_RUNS`` and ``PREFIXKIT_SOAK_STEPS`` make them more and longer; see ``scripts/memory_soak.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.preemption import Rate
from prefixkit.engine.request import BeamParams, Request, Sample
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.kv.prefixes.file import PrefixFileError
from prefixkit.kv.prefixes.transfer import load_prefixes, save_prefixes
from prefixkit.kv.prefixes.write import Origin
from prefixkit.runners.batch import STEP_BY_STEP, Pace
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, beams_alone
from prefixkit.testing.fake_model import VOCAB, logits_after, make_engine
from prefixkit.tree.eviction import POLICIES
from tests.engine.integrity import check_engine, check_idle
from tests.tree.model import assert_snapshot_is_fresh, fingerprint

RUNS = int(os.environ.get("PREFIXKIT_SOAK_RUNS", "5"))
STEPS = int(os.environ.get("PREFIXKIT_SOAK_STEPS", "30"))

PICK = st.integers(0, 10**6)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=10)
PREFIX = st.tuples(PICK, st.integers(0, 40), TOKENS)  # so many tokens of one known, and more
SAMPLING = st.builds(
    SamplingParams,
    n=st.integers(1, 8),
    seed=st.integers(0, 2),
    max_new_tokens=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    stop_token_ids=st.sampled_from([(), (3, 4)]),
)
SEARCHING = st.builds(
    BeamParams,
    num_beams=st.integers(1, 4),
    max_new_tokens=st.integers(1, 20),
    stop_token_ids=st.sampled_from([(), (3,)]),
)
ASKED = st.tuples(PREFIX, st.one_of(SAMPLING, SAMPLING, SEARCHING), st.integers(0, 2))
POLICY = st.builds(
    MemoryPolicy,
    eviction=st.sampled_from(sorted(POLICIES)),
    preemption=st.sampled_from(["swap", "recompute", "auto"]),
    headroom=st.sampled_from([0, 0, 1, 2, 16]),  # with more than samples have tokens nothing is preempted
    swap_space=st.sampled_from([0, 200, 2**30]),
    patience=st.sampled_from([0, 5, 1024]),
)
PACES = STEP_BY_STEP, Pace(2, 16, waited_for=8), Pace(3, 2, waited_for=1)


class Failure(Exception):
    """What a callback or the model raises."""


@lru_cache(10**5)
def expected_of(prompt: tuple[int, ...], params: SamplingParams | BeamParams, index: int) -> list[int]:
    """The tokens of a sample, or of a search's sequence of this rank."""
    tokens = np.array(prompt, np.int32)
    if isinstance(params, BeamParams):
        return list(beams_alone(tokens, params)[index].tokens)
    return alone(tokens, params, index)


def idle(machine: EngineMachine) -> bool:
    return machine.stream is None


def streaming(machine: EngineMachine) -> bool:
    return machine.stream is not None


class EngineMachine(RuleBasedStateMachine):
    """What a session can do, and when; a stream may stay open while pins go and memory is evicted."""

    page_size: ClassVar[int]
    done: ClassVar[Counter[str]]  # over all histories

    @initialize(
        num_pages=st.integers(3, 30),
        policy=POLICY,
        pace=st.sampled_from(PACES),
        chunk=st.sampled_from([1, 5, 1024]),
        most_running=st.sampled_from([1, 3, 1000]),
        retain_samples=st.booleans(),
        computing=st.sampled_from([1e-9, 1.0]),
    )
    def begin(
        self,
        num_pages: int,
        policy: MemoryPolicy,
        pace: Pace,
        chunk: int,
        most_running: int,
        retain_samples: bool,
        computing: float,
    ) -> None:
        num_pages += 40 // self.page_size  # most requests fit
        self.engine, self.model = make_engine(
            num_pages,
            self.page_size,
            pace,
            policy=policy,
            prefill_chunk=chunk,
            most_running=most_running,
            retain_samples=retain_samples,
        )
        self.engine.store.notes["rate of computing"] = Rate(
            1e15, computing * 1e15
        )  # "auto" recomputes, or swaps, always
        self.engine.runner.model = self.run_model
        self.known: list[tuple[int, ...]] = [()]
        self.pins: list[Any] = []  # sequences of the tree
        self.stream: Iterator[Sample] | None = None
        self.begun = False
        self.missing: set[tuple[int, int]] = set()
        self.requests: list[Request] = []
        self.fuse: tuple[str, int, type[BaseException]] | None = None
        self.saved_with = -1  # the weights of the file
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "prefixes.safetensors"

    # -- what rules share ----------------------------------------------------------------------------------------------

    def burn(self, where: str) -> None:
        """Raise, if it is time."""
        if self.fuse is not None and self.fuse[0] == where:
            _, left, error = self.fuse
            self.fuse = (where, left - 1, error) if left else None
            if not left:
                raise error

    def run_model(self, step: Any) -> torch.Tensor:
        self.burn("model")
        logits = self.model(step)
        self.burn("after the model")
        return logits

    def prefix(self, pick: tuple[int, int, list[int]]) -> tuple[int, ...]:
        number, keep, tokens = pick
        prefix = (*self.known[number % len(self.known)][: min(keep, 20)], *tokens)
        self.learn(prefix)
        return prefix

    def learn(self, tokens: tuple[int, ...]) -> None:
        if tokens not in self.known:
            self.known = [*self.known[-15:], tokens]

    def check(self, sample: Sample) -> None:
        request = self.requests[sample.prompt_index]
        prompt = tuple(request.tokens.tolist())
        assert sample.tokens == expected_of(prompt, request.params, sample.index)
        self.missing.remove((sample.prompt_index, sample.index))
        self.learn((*prompt, *sample.tokens))
        self.done["samples"] += 1

    def end(self) -> None:
        """The stream has ended, or was ended."""
        self.stream, self.fuse = None, None
        self.engine.options.clear()

    def attempt(self, change: Any) -> Any:
        """What ``change`` gives; None where it failed as it was to, or was refused without a trace."""
        before = fingerprint(self.engine.store.tree)
        steps = len(self.model.rows_per_step)
        try:
            return change()
        except KVBudgetTooSmall:
            self.done["refused"] += 1
            if steps == len(self.model.rows_per_step):
                assert fingerprint(self.engine.store.tree) == before
        except (Failure, KeyboardInterrupt) as error:
            self.done[type(error).__name__] += 1
            if isinstance(error, KeyboardInterrupt):
                self.interrupted()
        return None

    def interrupted(self) -> None:
        """The engine has planted another tree: pins have no effect any more."""
        for sequence in self.pins:
            sequence.tree.retain(sequence)
        self.pins = []

    # -- rules -----------------------------------------------------------------------------------------------------

    @precondition(idle)
    @rule(asked=st.lists(ASKED, min_size=2, max_size=8), by_token=st.booleans())
    def submit(self, asked: list[Any], by_token: bool) -> None:
        """Samples and searches, whose prompts begin as earlier prompts and samples do."""
        self.requests = [
            Request(i, np.array(self.prefix(pick)), params, priority=priority)
            for i, (pick, params, priority) in enumerate(asked)
        ]
        counts = [one.params.n if isinstance(one.params, SamplingParams) else 1 for one in self.requests]
        self.missing = {(i, index) for i, count in enumerate(counts) for index in range(count)}
        self.engine.options.update(
            on_sample=lambda sample: self.burn("sample"),
            on_token=(lambda event: self.burn("token")) if by_token else None,
            on_step=lambda rows: self.burn("step"),
        )
        self.engine.report = Report()
        self.stream, self.begun = self.engine.stream(self.requests), False

    @precondition(streaming)
    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        """Some samples."""
        for _ in range(count):
            if self.stream is not None:
                self.attempt(self.take_one)
                if self.stream is not None and self.begun is False:
                    self.end()  # it was refused, or has failed

    def take_one(self) -> None:
        assert self.stream is not None
        self.begun = False
        sample = next(self.stream, None)
        if sample is None:
            assert not self.missing
            self.done["runs to the end"] += 1
            self.count()
            self.end()
        else:
            self.check(sample)
            self.begun = True

    @precondition(lambda self: self.stream is not None and self.begun and self.fuse is None)
    @rule(count=st.integers(1, 10))
    def step(self, count: int) -> None:
        """Step by step, with a look at the tree after each."""
        for _ in range(count):
            if not self.engine.last.scheduler.idle:
                for sample in self.engine.last.step():
                    self.check(sample)
                check_engine(self.engine, self.model)

    @precondition(streaming)
    @rule()
    def run(self) -> None:
        """To the end."""
        while self.stream is not None:
            self.take(1)

    @precondition(streaming)
    @rule()
    def close(self) -> None:
        """Drop what is under way."""
        assert self.stream is not None
        self.stream.close()  # type: ignore[attr-defined]
        self.done["streams closed"] += 1
        self.count()
        self.end()

    @precondition(lambda self: self.fuse is None)
    @rule(
        where=st.sampled_from(["model", "after the model", "token", "sample", "step"]),
        left=st.integers(0, 60),
        error=st.sampled_from([Failure, KeyboardInterrupt]),
    )
    def light(self, where: str, left: int, error: type[BaseException]) -> None:
        """Something is going to fail."""
        self.fuse = where, left, error

    @precondition(idle)
    @rule(
        prompts=st.lists(st.tuples(PREFIX, st.lists(TOKENS, min_size=1, max_size=4)), min_size=1, max_size=3),
    )
    def score(self, prompts: list[Any]) -> None:
        own = [np.array(self.prefix(pick), np.int32) for pick, _ in prompts]
        continuations = [[np.array(tokens, np.int32) for tokens in each] for _, each in prompts]
        scores = self.attempt(lambda: self.engine.score(own, continuations, VOCAB))
        if scores is None:
            return
        self.done["scores"] += sum(map(len, scores))
        for prompt, each, found in zip(own, continuations, scores, strict=True):
            for tokens, score in zip(each, found, strict=True):
                after = [logits_after([*prompt, *tokens[:i]]) for i in range(len(tokens))]
                logits = torch.from_numpy(np.stack(after))
                told = logits.double().log_softmax(-1)[np.arange(len(tokens)), tokens]
                # float32 rounds the exponents' sum, and the difference of numbers as large as the largest logit.
                within = 4 * np.spacing(np.abs(after).max())
                np.testing.assert_allclose(score.logprobs, told, rtol=0, atol=within)
                np.testing.assert_array_equal(score.greedy, logits.argmax(-1).numpy() == tokens)

    @precondition(lambda self: idle(self) and len(self.pins) < 2)  # more of them would leave no room
    @rule(pick=PREFIX)
    def pin(self, pick: tuple[int, int, list[int]]) -> None:
        tokens = self.prefix(pick)
        if (sequence := self.attempt(lambda: self.pinned(tokens))) is not None:
            self.pins.append(sequence)
            self.done["pins"] += 1

    def pinned(self, tokens: tuple[int, ...]) -> Any:
        request = Request(0, np.array(tokens), SamplingParams(max_new_tokens=1))
        self.engine.run([request])
        sequence = self.engine.store.pin(request.tokens)
        assert sequence.node.computed == sequence.node.length
        return sequence

    @precondition(lambda self: self.pins)
    @rule(number=PICK)
    def unpin(self, number: int) -> None:
        sequence = self.pins.pop(number % len(self.pins))
        sequence.tree.retain(sequence)

    @rule(pages=st.integers(0, 60))
    def free_pages(self, pages: int) -> None:
        evicted = self.engine.store.cache.tokens_evicted
        made = self.engine.store.cache.free_pages(pages)
        assert made == (self.engine.store.tree.allocator.free >= pages)
        self.done["tokens evicted by hand"] += self.engine.store.cache.tokens_evicted - evicted

    @rule()
    def clear(self) -> None:
        self.engine.store.cache.clear()
        assert not self.engine.store.tree.num_cached or self.stream is not None or self.pins

    @precondition(idle)
    @rule()
    def change_weights(self) -> None:
        self.model.weights += 1
        self.engine.store.invalidate()
        self.engine.runner.drop_graphs()
        assert not any(node.computed for node in self.engine.store.tree.nodes())

    @precondition(idle)
    @rule(picks=st.lists(PREFIX, min_size=1, max_size=3))
    def save(self, picks: list[Any]) -> None:
        """As a session does: prompts are computed and pinned, one after the other."""
        prefixes, pins = [self.prefix(pick) for pick in picks], list[Any]()

        def saved() -> None:
            for prefix in prefixes:
                pins.append(self.pinned(prefix))
            save_prefixes(self.engine.store, self.path, pins, Origin(f"weights {self.model.weights}"))
            self.saved_with = self.model.weights
            self.done["saves"] += 1

        self.attempt(saved)
        for pin in pins:
            pin.tree.retain(pin)

    @precondition(lambda self: idle(self) and self.saved_with >= 0)
    @rule(empty=st.booleans())
    def load(self, empty: bool) -> None:
        if empty:
            self.engine.store.cache.clear()
        before = fingerprint(self.engine.store.tree)
        try:
            self.attempt(
                lambda: load_prefixes(self.engine.store, self.path, Origin(f"weights {self.model.weights}"), VOCAB)
            )
            self.done["loads"] += 1
        except PrefixFileError:
            assert self.saved_with != self.model.weights
            assert fingerprint(self.engine.store.tree) == before
        else:
            assert self.saved_with == self.model.weights

    @precondition(streaming)
    @rule()
    def run_again(self) -> None:
        """As often as the other rules together, or most requests are dropped before they end."""
        self.run()

    # -- what must hold after each -------------------------------------------------------------------------------------

    def count(self) -> None:
        report = self.engine.report
        for name in ("preempted_swapped", "preempted_recomputed", "tokens_evicted", "prompt_tokens_found"):
            self.done[name] += getattr(report, name)
        if self.begun and self.engine.last is not None:
            self.done["steps"] += self.engine.last.scheduler.steps

    @invariant()
    def the_pool_holds_what_the_tree_says(self) -> None:
        check_engine(self.engine, self.model)
        assert_snapshot_is_fresh(self.engine.store.tree)

        self.done["rules"] += 1

    @invariant()
    def between_calls_nothing_is_left_but_pins(self) -> None:
        pages = [sequence.slots() // self.page_size for sequence in self.pins]
        assert self.engine.store.budget().pinned_pages == len(set(np.concatenate(pages).tolist() if pages else []))
        if self.stream is None:
            check_idle(self.engine, len(self.pins))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        if self.stream is not None:
            self.close()
        for sequence in self.pins:
            sequence.tree.retain(sequence)
        check_idle(self.engine, 0)
        self.engine.store.cache.clear()
        check_engine(self.engine, self.model)
        assert self.engine.store.tree.pages_held() == 0
        assert self.engine.store.tree.allocator.free == self.engine.store.tree.allocator.num_pages
        assert self.engine.store.tree.nodes() == [] and not self.engine.store.tree.root.branches
        self.folder.cleanup()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_histories(page_size: int) -> None:
    machine = type(f"EngineMachine{page_size}", (EngineMachine,), {"page_size": page_size, "done": Counter()})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=RUNS,
            phases=[Phase.generate, *([] if STEPS > 30 else [Phase.shrink])],  # long ones take an hour to shrink
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            print_blob=True,
        ),
    )
    print(f"page size {page_size}:", ", ".join(f"{count} {what}" for what, count in sorted(machine.done.items())))
