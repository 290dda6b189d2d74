"""From an exception to one readable line and an exit status."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from prefixkit.cli.terminal import line, terminal

FAILED, INTERRUPTED = 1, 130
# What allocators say where torch raises no OutOfMemoryError: torch's on the CPU, CUDA's driver, cuBLAS's workspace.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
_REMEDY = (
    "lower -n, --max-new-tokens or --kv-budget, give fewer prompts at once (--limit), or a smaller --dtype or model"
)


class Interrupted(Exception):
    """The user stopped a run; the message says what is finished and where it is."""


@contextmanager
def reported(console: Console | None = None) -> Iterator[None]:
    """Print an error a user can act on as one line (on standard error, where no console is given), and exit.

    ``PREFIXKIT_TRACEBACK=1`` lets it through instead.
    """
    console = console or terminal(stderr=True)
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        console.print(line(("interrupted", "yellow"), f" {stop}".rstrip()), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    except (ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError) as error:
        message = _out_of_memory(error)
        if os.environ.get("PREFIXKIT_TRACEBACK") or (isinstance(error, RuntimeError) and not message):
            raise  # a RuntimeError of another kind is a defect
        message = message or str(error) or type(error).__name__
        console.print(line(("error:", "red"), f" {message}", keep="\n"), soft_wrap=True)
        raise SystemExit(FAILED) from None


def _out_of_memory(error: Exception) -> str | None:
    """What to say where ``error`` is an allocation that failed, on any device; None where it is something else."""
    said = " ".join(str(error).split())
    refused = isinstance(error, RuntimeError) and any(words in said.lower() for words in _NO_MEMORY)
    if not (refused or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)):
        return None
    return f"out of memory ({said or 'no details'}); {_REMEDY}"
