"""State that threads share: made once, counted without a loss."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixkit.checking import checked, checked_mode
from prefixkit.threads import EventCount, once


def together(number, work):
    """What ``work`` gives in so many threads that begin at once."""
    begin = threading.Barrier(number)

    def run(index):
        begin.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


def test_threads_that_ask_together_get_the_one_thing_that_is_made():
    made = []

    @once
    def make(key):
        made.append(key)
        threading.Event().wait(0.02)  # while the others come
        return object()

    assert len(set(together(4, lambda index: make("a")))) == 1
    assert made == ["a"]
    assert make("b") is not make("a")
    make.clear()
    make("a")
    assert made == ["a", "b", "a"]


def test_what_could_not_be_made_is_tried_again():
    tries = []

    @once
    def make():
        tries.append(None)
        if len(tries) < 2:
            raise OSError("not yet")
        return 5

    with pytest.raises(OSError, match="not yet"):
        make()
    assert make() == make() == 5


def test_events_of_all_threads_are_counted():
    events, before = EventCount(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        counts = together(4, lambda index: [events.add() for _ in range(2000)])
    finally:
        sys.setswitchinterval(before)
    assert events.count == len({count for each in counts for count in each}) == 8000


def test_checked_mode_is_of_the_thread_that_asked_for_it():
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(checked).result()
        with checked_mode(not before):
            assert checked() != before
            assert pool.submit(checked).result() == before
        assert checked() == before
