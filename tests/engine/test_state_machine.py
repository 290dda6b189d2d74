"""Random histories of an engine whose prefix cache outlives its calls: whatever happens, samples are as if alone.

``PREFIXKIT_SOAK_RUNS`` and ``PREFIXKIT_SOAK_STEPS`` make them more and longer; see ``scripts/memory_soak.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixkit.engine.request import Request
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.prefixes.file import PrefixFileError
from prefixkit.kv.prefixes.transfer import load_prefixes, save_prefixes
from prefixkit.kv.prefixes.write import Origin
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.fake_model import VOCAB, logits_after
from tests.engine.engine_history import ASKED, PICK, PREFIX, TOKENS, EngineHistory, Failure
from tests.engine.integrity import check_engine
from tests.tree.model import fingerprint

RUNS = int(os.environ.get("PREFIXKIT_SOAK_RUNS", "5"))
STEPS = int(os.environ.get("PREFIXKIT_SOAK_STEPS", "30"))


def idle(machine: EngineHistory) -> bool:
    return machine.stream is None


def streaming(machine: EngineHistory) -> bool:
    return machine.stream is not None


class EngineMachine(EngineHistory):
    """What a session can do, and when; a stream may stay open while pins go and memory is evicted."""

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

    def teardown(self) -> None:
        if getattr(self, "stream", None) is not None:
            self.close()
        super().teardown()


@pytest.mark.drawn(1)
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
