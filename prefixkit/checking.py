"""Checked mode: with ``PREFIXKIT_CHECK=1`` what runs on a GPU reads its integers and refuses what points outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_on = os.environ.get("PREFIXKIT_CHECK", "0") not in ("", "0")


def checked() -> bool:
    """Whether page and slot numbers are to be checked, and errors to be raised at the launch that made them."""
    return _on


@contextmanager
def checked_mode(on: bool = True) -> Iterator[None]:
    """Checked mode on or off, whatever the environment says; for tests, in one thread."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before
