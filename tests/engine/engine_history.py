"""An engine whose prefix cache outlives its calls, under random histories: see ``test_state_machine.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
)

from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.preemption import Rate
from prefixkit.engine.request import BeamParams, Request, Sample
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.runners.batch import STEP_BY_STEP, Pace
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, beams_alone
from prefixkit.testing.fake_model import make_engine
from prefixkit.tree.eviction import POLICIES
from tests.engine.integrity import check_engine, check_idle
from tests.runners.stand_ins import RoomyPlanning, graph_runner
from tests.tree.model import assert_snapshot_is_fresh, fingerprint

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


class EngineHistory(RuleBasedStateMachine):
    """An engine with what its history needs to be checked: what rules share, and what must hold after each."""

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
        short=st.sampled_from([None, 0, 4096]),
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
        short: int | None,
    ) -> None:
        """``short``: graphs of stand-ins run decode steps, and other steps of so many rows; None: there are none."""
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
        if short is not None:
            options = {"planning": RoomyPlanning, "pace": pace, "short": short}
            self.engine.runner = graph_runner(self.engine, self.run_model, **options)
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
        """The engine has another tree: pins have no effect any more."""
        for sequence in self.pins:
            sequence.tree.retain(sequence)
        self.pins = []

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
        for sequence in self.pins:
            sequence.tree.retain(sequence)
        check_idle(self.engine, 0)
        self.engine.store.cache.clear()
        check_engine(self.engine, self.model)
        assert self.engine.store.tree.pages_held() == 0
        assert self.engine.store.tree.allocator.free == self.engine.store.tree.allocator.num_pages
        assert self.engine.store.tree.nodes() == [] and not self.engine.store.tree.root.branches
        self.folder.cleanup()
