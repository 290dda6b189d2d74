"""What keeps the judge from judging at all, as against a verdict."""

from __future__ import annotations


class NoSandbox(OSError):
    """There is no sandbox to be had here; the message names the remedy."""


class NoCompiler(OSError):
    """C++ programs cannot be judged here, since there is no compiler; the message names the remedy."""


class BadTests(ValueError):
    """A problem's own tests do not run, whatever the candidate."""
