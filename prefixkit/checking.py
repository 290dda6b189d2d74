"""Checked mode: with ``PREFIXKIT_CHECK=1`` GPU ops read their page and slot numbers and refuse those out of range."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on = ContextVar("PREFIXKIT_CHECK", default=os.environ.get("PREFIXKIT_CHECK", "0") not in ("", "0"))


def checked() -> bool:
    """Whether page and slot numbers are checked, and errors of kernels are raised at the launch that caused them."""
    return _on.get()


@contextmanager
def checked_mode(on: bool = True) -> Iterator[None]:
    """Turn checked mode on or off in this thread, whatever the environment says; for tests."""
    before = _on.set(on)
    try:
        yield
    finally:
        _on.reset(before)
