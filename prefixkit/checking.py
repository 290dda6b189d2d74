"""Checked mode: with ``PREFIXKIT_CHECK=1`` what runs on a GPU reads its integers and refuses what points outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on = ContextVar("PREFIXKIT_CHECK", default=os.environ.get("PREFIXKIT_CHECK", "0") not in ("", "0"))


def checked() -> bool:
    """Whether page and slot numbers are to be checked, and errors to be raised at the launch that made them."""
    return _on.get()


@contextmanager
def checked_mode(on: bool = True) -> Iterator[None]:
    """Checked mode on or off, whatever the environment says; for tests, in this thread."""
    before = _on.set(on)
    try:
        yield
    finally:
        _on.reset(before)
