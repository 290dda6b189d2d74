"""Ctrl-C at any line leaves a session that works: nothing queued, no page lost, the samples of every other session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import MemoryPolicy, Session
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.tiny import ByteTokenizer

PROMPTS = ["the quick brown fox jumps", "the quick brown dog", "the quick brown"]
POINTS = 10
# Between the two bytecodes that take and remember a lock a signal does not arrive, but a tracer does; and before a
# session forgets its call.
APART = {"_busy", "locked", "__enter__", "__exit__", "kv_version", "optimizer_steps"}
CALLS: dict[str, Callable[[Session, Path], object]] = {
    "generate": lambda session, path: session.generate(PROMPTS, n=4, max_new_tokens=8, stop_token_ids=(), seed=1),
    "score": lambda session, path: session.score(PROMPTS, [" over", " a"]),
    "pin": lambda session, path: session.pin(PROMPTS[0]),
    "load": lambda session, path: session.load(path),
    "weights_changed": lambda session, path: session.weights_changed(),
}


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of prefixkit that runs, or of one function of it; counts them."""

    def __init__(self, at: int, function: str = "") -> None:
        self.at, self.lines, self.function = at, 0, function

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/prefixkit/" not in file or (name != self.function if self.function else name in APART):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def traced(call: Callable[[], object], at: int, function: str = "") -> int:
    """Lines that ran."""
    interrupt, before = Interrupt(at, function), sys.gettrace()
    sys.settrace(interrupt)
    try:
        call()
    finally:
        sys.settrace(before)
    return interrupt.lines


def used(model: Any) -> Session:
    """A small session, with prompts in its cache."""
    session = Session(model, ByteTokenizer(), kv_budget="64KiB", page_size=4, memory=MemoryPolicy("lru", "swap", 4))
    session.generate(PROMPTS[1:], n=2, max_new_tokens=4, stop_token_ids=())
    return session


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_anywhere_leaves_the_session_as_new(model: Any, tmp_path: Path, name: str) -> None:
    path, greedy = tmp_path / "prefixes.safetensors", {"temperature": 0.0, "max_new_tokens": 3, "stop_token_ids": ()}
    with used(model) as session:
        session.save(path, PROMPTS)
        expected = session.generate(PROMPTS[0], **greedy)[0].tokens
    with used(model) as session:
        lines = traced(lambda: CALLS[name](session, path), -1)
    for at in np.random.default_rng(0).choice(np.arange(1, lines), min(POINTS, lines - 1), replace=False).tolist():
        with used(model) as session:
            with pytest.raises(KeyboardInterrupt):
                traced(lambda at=at: CALLS[name](session, path), at)
            after = session.generate(PROMPTS[0], **greedy)
            assert [sample.tokens for sample in after] == [expected]
            store = session.store
            assert store is not None
            check_tree(store.tree)
            for pin in store.pins:  # made, but never returned
                store.tree.retain(pin)
            store.cache.clear()
            assert store.tree.allocator.free == store.tree.allocator.num_pages


def test_an_interrupt_while_a_session_begins_a_call_leaves_it_usable(model: Any) -> None:
    """As when Ctrl-C comes while Python returns from the function by which the session takes note of the call."""
    with used(model) as session:
        for line in range(1, 5):
            with pytest.raises(KeyboardInterrupt):
                traced(lambda: session.generate(PROMPTS, max_new_tokens=2), line, "_busy")
            assert len(session.generate(PROMPTS, max_new_tokens=2)) == len(PROMPTS)


def test_an_interrupt_as_the_models_own_generate_gives_its_kv_back_reaches_the_caller(model: Any) -> None:
    prefixkit.patch(model, tree_cache="always")
    ids, options = torch.arange(5, 45)[None], {"num_beams": 2, "max_new_tokens": 4, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    for line in range(1, 5):
        with pytest.raises(KeyboardInterrupt):
            traced(lambda: model.generate(ids, **options), line, "_return")
        assert torch.equal(model.generate(ids, **options), expected)


def test_nothing_of_an_interrupted_call_stays_queued(model: Any) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with Session(model, ByteTokenizer(), kv_budget="4MiB", most_running=1) as session:
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPTS * 4, n=2, max_new_tokens=4, on_step=interrupt)
        assert len(session.generate(PROMPTS[0], max_new_tokens=4)) == 1


def test_a_pin_of_before_an_interrupt_can_be_released(model: Any) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with Session(model, ByteTokenizer(), kv_budget="4MiB") as session:
        pin = session.pin(PROMPTS[0])
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPTS, max_new_tokens=4, on_step=interrupt)
        pin.release()
        with pytest.raises(ValueError, match="was released before"):
            pin.release()
