"""Random trees of sessions whose model keeps states: whatever happened before, samples are as if from scratch.

``PREFIXKIT_SOAK_RUNS`` and ``PREFIXKIT_SOAK_STEPS`` make histories more and longer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

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

import prefixkit
from prefixkit import BeamParams, KVBudgetTooSmall, MemoryPolicy, SamplingParams, Session
from prefixkit.models import facts_of
from prefixkit.testing.integrity import check_tree
from prefixkit.tree import Node
from tests.models.states.hybrids import assert_logprobs, by_pass, make_hybrid
from tests.tree.model import assert_snapshot_is_fresh, path

RUNS = int(os.environ.get("PREFIXKIT_SOAK_RUNS", "2"))
STEPS = int(os.environ.get("PREFIXKIT_SOAK_STEPS", "14"))
# Nemotron-H's own code rounds time steps up in passes over several tokens alone, so its states depend on the passes.
KINDS = ["lfm2", "jamba", "mamba2", *(["qwen3_next", "mamba"] if RUNS > 20 else [])]

PICK = st.integers(0, 10**6)
TOKENS = st.lists(st.integers(3, 5), min_size=1, max_size=12)
PREFIX = st.tuples(PICK, st.integers(0, 60), TOKENS)  # so many tokens of one known, and more
SAMPLING = st.builds(
    SamplingParams,
    n=st.integers(1, 5),
    seed=st.integers(0, 2),
    max_new_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    stop_token_ids=st.sampled_from([(), tuple(range(20, 40))]),
)
SEARCHING = st.builds(
    BeamParams,
    num_beams=st.integers(2, 4),
    max_new_tokens=st.integers(1, 20),
    stop_token_ids=st.sampled_from([(), tuple(range(20, 40))]),
)
ASKED = st.tuples(PREFIX, st.one_of(SAMPLING, SAMPLING, SEARCHING))
POLICY = st.builds(
    MemoryPolicy,
    eviction=st.sampled_from(["lru", "lfu", "cost"]),
    preemption=st.sampled_from(["swap", "recompute", "auto"]),
    headroom=st.sampled_from([0, 2, 16]),
    swap_space=st.sampled_from([0, 20_000, 2**30]),
    patience=st.sampled_from([0, 1024]),
)


@lru_cache
def patched(kind: str) -> Any:
    dense = {"num_experts": 1} if kind == "jamba" else {}  # experts take half of its time, and keep no state
    return prefixkit.patch(make_hybrid(kind, **dense))


def idle(machine: StatesMachine) -> bool:
    return machine.stream is None


class StatesMachine(RuleBasedStateMachine):
    """Calls of a session of few pages and few slots, which part from earlier ones anywhere."""

    kind: ClassVar[str]
    done: ClassVar[Counter[str]]  # over all histories

    @initialize(
        tokens=st.sampled_from([130, 180, 800]),
        slots=st.sampled_from([9, 12, 20, 24, 60, 500]),
        page_size=st.sampled_from([1, 4, 16]),
        policy=POLICY,
        chunk=st.sampled_from([1, 5, 1024]),
        most_running=st.sampled_from([1, 3, 1000]),
        every=st.sampled_from([7, 256]),
    )
    def begin(
        self,
        tokens: int,
        slots: int,
        page_size: int,
        policy: MemoryPolicy,
        chunk: int,
        most_running: int,
        every: int,
    ) -> None:
        self.model = patched(self.kind)
        spec = facts_of(self.model).spec
        budget = 2 * tokens * spec.bytes_per_token + 64 * spec.bytes_per_token
        given = {"page_size": page_size, "prefill_chunk": chunk, "most_running": most_running, "memory": policy}
        self.session = Session(self.model, kv_budget=budget, **given)
        self.session.store.most_state_bytes = slots * spec.bytes_per_state
        self.session.store.tree.states.every = every
        self.scratch = Session(self.model, kv_budget="1MiB")
        self.known: list[tuple[int, ...]] = [()]
        self.pins: list[Any] = []
        self.stream: Iterator[Any] | None = None
        self.prompts: list[tuple[int, ...]] = []
        self.looks = 0
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "prefixes.safetensors"

    # -- what rules share ----------------------------------------------------------------------------------------------

    def prefix(self, pick: tuple[int, int, list[int]]) -> tuple[int, ...]:
        number, keep, tokens = pick
        prefix = (*self.known[number % len(self.known)][:keep], *tokens)
        self.learn(prefix)
        return prefix

    def learn(self, tokens: tuple[int, ...]) -> None:
        if tokens not in self.known:
            self.known = [*self.known[-15:], tokens]

    def check(self, samples: list[Any]) -> None:
        assert_logprobs(self.model, self.prompts, samples[:: 1 + len(samples) // 4])
        self.done["samples"] += len(samples)
        for sample in samples[-4:]:
            self.learn((*self.prompts[sample.prompt_index], *sample.tokens))

    def attempt(self, call: Any) -> Any:
        """What a call gives; None where it does not fit."""
        try:
            return call()
        except KVBudgetTooSmall:
            self.done["refused"] += 1
            return None

    def count(self) -> None:
        report = self.session.report
        for name in ("preempted_swapped", "preempted_recomputed", "tokens_evicted", "prompt_tokens_found"):
            self.done[name] += getattr(report, name)
        each = report.bytes_per_state
        assert report.state_bytes_held_peak <= self.session.store.pool.states.slots * each

    # -- rules ---------------------------------------------------------------------------------------------------------

    @precondition(idle)
    @rule(asked=st.lists(ASKED, min_size=1, max_size=5))
    def generate(self, asked: list[Any]) -> None:
        """Samples and searches, whose prompts begin as earlier prompts and samples do."""
        self.prompts = [self.prefix(pick) for pick, _ in asked]
        requests = [
            prefixkit.Request(i, torch.tensor(prompt).int().numpy(), params)
            for i, (prompt, (_, params)) in enumerate(zip(self.prompts, asked, strict=True))
        ]
        if (found := self.attempt(lambda: self.session.run(requests))) is not None:
            self.check([*found])
            self.count()

    @precondition(idle)
    @rule(asked=st.lists(ASKED, min_size=2, max_size=6))
    def generate_more(self, asked: list[Any]) -> None:
        """More often than others, or little is in the tree."""
        self.generate(asked)

    @precondition(idle)
    @rule(picks=st.lists(PREFIX, min_size=1, max_size=3), params=SAMPLING)
    def begin_stream(self, picks: list[Any], params: SamplingParams) -> None:
        self.prompts = [self.prefix(pick) for pick in picks]
        self.stream = self.session.stream([list(prompt) for prompt in self.prompts], params)

    @precondition(lambda self: not idle(self))
    @rule(most=st.integers(1, 6), close=st.booleans())
    def take(self, most: int, close: bool) -> None:
        """Some samples, which others may have been dropped for."""
        assert self.stream is not None
        found = list[Any]()
        for _ in range(most):
            sample = self.attempt(lambda: next(self.stream, None))
            if sample is None:
                self.stream = None
                break
            found.append(sample)
        if found:
            self.check(found)
        if close and self.stream is not None:
            self.stream.close()
            self.stream = None
            self.done["streams closed"] += 1

    @precondition(idle)
    @rule(pick=PREFIX, options=st.lists(TOKENS, min_size=1, max_size=3))
    def score(self, pick: Any, options: list[list[int]]) -> None:
        prompt = self.prefix(pick)
        scores = self.attempt(lambda: self.session.score([list(prompt)], [options]))
        if scores is not None:
            for tokens, score in zip(options, scores[0], strict=True):
                right = by_pass(self.model, [*prompt, *tokens], len(prompt))
                assert (torch.from_numpy(score.logprobs) - right).abs().max() <= 2e-4
            self.done["scores"] += len(options)

    @precondition(lambda self: idle(self) and len(self.pins) < 3)
    @rule(pick=PREFIX)
    def pin(self, pick: Any) -> None:
        prefix = self.prefix(pick)
        if (pin := self.attempt(lambda: self.session.pin(list(prefix)))) is not None:
            self.pins.append(pin)

    @precondition(lambda self: idle(self) and self.pins)
    @rule(number=PICK)
    def unpin(self, number: int) -> None:
        self.pins.pop(number % len(self.pins)).release()

    @precondition(idle)
    @rule(pages=st.integers(0, 60))
    def evict(self, pages: int) -> None:
        self.session.store.cache.free_pages(pages)

    @precondition(idle)
    @rule(count=st.integers(1, 30))
    def drop_states(self, count: int) -> None:
        """As if others had needed their slots."""
        self.session.store.tree.states.spare(count)

    @precondition(idle)
    @rule(picks=st.lists(PREFIX, min_size=1, max_size=3), clear=st.booleans())
    def save_and_load(self, picks: list[Any], clear: bool) -> None:
        prefixes = [list(self.prefix(pick)) for pick in picks]
        if self.attempt(lambda: self.session.save(self.path, prefixes)) is not None:
            if clear:
                self.session.store.cache.clear()
            self.attempt(lambda: self.session.load(self.path))
            self.done["loads"] += 1

    # -- what must hold after each -------------------------------------------------------------------------------------

    @invariant()
    def the_tree_is_consistent(self) -> None:
        check_tree(self.session.store.tree)
        assert_snapshot_is_fresh(self.session.store.tree)
        self.done["rules"] += 1

    @precondition(idle)
    @invariant()
    def states_are_those_of_their_tokens(self) -> None:
        """One of them, the same as of a session that knows nothing."""
        store, scratch = self.session.store, self.scratch.store
        nodes = [store.tree.root]
        for node in nodes:  # the list grows while it is read
            nodes.extend(node.children)
        places = [(node, offset) for node in nodes for offset in node.states]
        if not places:
            return
        node, offset = places[self.looks % len(places)]
        self.looks += 1
        tokens = path(node)[: node.start + offset]
        scratch.cache.clear()
        with self.pinned(tokens) as end:
            theirs = scratch.pool.states.read(torch.tensor([end.state]).numpy())
            ours = store.pool.states.read(torch.tensor([node.state_at(offset)]).numpy())
            for one, other in zip(ours, theirs, strict=True):
                # Rounding is some 1e-6 of the largest (3e-6 in 16 texts of each kind, in pieces of 1 and of 5 tokens).
                assert (one - other).abs().max() <= 1e-4 * other.abs().max(), (node, offset)
        self.done["states compared"] += 1

    def teardown(self) -> None:
        if hasattr(self, "session"):
            if self.stream is not None:
                self.stream.close()
            for pin in self.pins:
                pin.release()
            self.session.store.cache.clear()
            check_tree(self.session.store.tree)
            assert self.session.store.tree.states.used == 0
            assert not self.session.store.tree.root.branches
            self.session.close()
            self.scratch.close()
            self.folder.cleanup()

    def pinned(self, tokens: tuple[int, ...]) -> Any:
        return _Pinned(self.scratch, tokens)


class _Pinned:
    def __init__(self, session: Session, tokens: tuple[int, ...]) -> None:
        self.pin = session.pin(list(tokens))

    def __enter__(self) -> Node:
        return self.pin.sequence.node

    def __exit__(self, *error: object) -> None:
        self.pin.release()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", KINDS)
def test_random_trees(kind: str) -> None:
    machine = type(f"StatesMachine_{kind}", (StatesMachine,), {"kind": kind, "done": Counter()})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=RUNS,
            phases=[Phase.generate, *([] if STEPS > 30 else [Phase.shrink])],
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            print_blob=True,
        ),
    )
    print(f"{kind}:", ", ".join(f"{count} {what}" for what, count in sorted(machine.done.items())))
