"""Whether a call uses a cache or the cache is idle between calls; and which caches a call of ``generate()`` uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class InUse:
    """Counts calls that use a cache, which stays in its KV store during ``generate()`` and during each method."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1

    @contextmanager
    def unless(self) -> Iterator[bool]:
        """Yield whether no call uses the cache; if so, no call starts to use it inside the context."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            yield not self._count
        finally:
            self._lock.release()


_calls = threading.local()


@contextmanager
def generating() -> Iterator[list[Any]]:
    """The context of a call of ``generate()``: the caches that the call uses stay in their KV stores until its end.

    Yields a list for the caches that the call makes; see :func:`note`.
    """
    outer = getattr(_calls, "uses", None), getattr(_calls, "made", None)
    made: list[Any] = []
    try:
        with ExitStack() as _calls.uses:
            _calls.made = made
            yield made
    finally:
        _calls.uses, _calls.made = outer


def note(cache: object) -> None:
    """Note that the call of ``generate()`` in progress, if there is one, has made a cache."""
    if (made := getattr(_calls, "made", None)) is not None:
        made.append(cache)


def use(cache: InUse) -> None:
    """Register this cache as used by the call of ``generate()`` in progress, if there is one."""
    if (uses := getattr(_calls, "uses", None)) is not None:
        uses.enter_context(cache)
