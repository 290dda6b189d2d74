"""State of threads: results made once, counts that lose no event, and values that a thread sets for a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class once(Generic[T]):
    """``functools.cache`` whose function runs once per arguments, even if several threads call it at the same time."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make, self._made, self._lock = make, dict[tuple[Hashable, ...], T](), threading.RLock()

    def __call__(self, *key: Hashable) -> T:
        try:
            return self._made[key]
        except KeyError:
            pass
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(*key)
            return self._made[key]

    def clear(self) -> None:
        """Drop all results, so that the next call makes each anew; no other thread may call meanwhile."""
        self._made.clear()


class EventCount:
    """The number of events that all threads have counted."""

    def __init__(self) -> None:
        self.count, self._lock = 0, threading.Lock()

    def add(self) -> int:
        """Count an event; returns the count, which no other event gets."""
        with self._lock:
            self.count += 1
            return self.count


@contextmanager
def set_within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """In this block, and only in this thread, ``variable`` has ``value``."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
