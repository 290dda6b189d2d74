"""Errors that prevent a verdict."""

from __future__ import annotations


class NoSandbox(OSError):
    """No sandbox can be made on this machine; the message names the remedy."""


class NoCompiler(OSError):
    """C++ programs cannot be judged, since this machine has no compiler; the message names the remedy."""


class BadTests(ValueError):
    """A problem's own tests do not run, whatever the candidate.

    Attributes:
        delayed: Whether they may have exceeded their time because of load on the machine.
    """

    delayed = False
