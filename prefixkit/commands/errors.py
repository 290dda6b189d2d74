"""From an exception to one readable line and an exit status."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

FAILED, INTERRUPTED = 1, 130


class Interrupted(Exception):
    """The user stopped a run; the message says what is finished and where it is."""


@contextmanager
def reported(console: Console) -> Iterator[None]:
    """Print an error a user can act on as one line, and exit; ``PREFIXKIT_TRACEBACK=1`` lets it through instead."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        console.print(f"[yellow]interrupted[/yellow] {escape(str(stop))}".rstrip(), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("PREFIXKIT_TRACEBACK"):
            raise
        console.print(f"[red]error:[/red] {escape(str(error) or type(error).__name__)}", soft_wrap=True)
        raise SystemExit(FAILED) from None
