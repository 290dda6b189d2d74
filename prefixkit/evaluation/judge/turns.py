"""Concurrent runs, and runs that must be alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Admits many runs at once, or one alone; a run that waits to be alone goes before runs that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running, self._waiting, self._alone = 0, 0, False

    @contextmanager
    def turn(self, alone: bool) -> Iterator[None]:
        with self._changed:
            self._waiting += alone
            self._changed.wait_for(lambda: not self._alone and not (self._running if alone else self._waiting))
            self._waiting -= alone
            self._running += 1
            self._alone = alone
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._alone = False
                self._changed.notify_all()
