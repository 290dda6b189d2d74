"""Turn an exception into one readable line and an exit status.

2: the command cannot do what was asked, and has written nothing.  1: the command failed while it was at work, and
what had finished is kept.  130: Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from prefixkit.cli.terminal import line, terminal

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
_AT_WORK = "_prefixkit_at_work"
# The base class of the parser's errors: typer contains a copy of click, or uses the installed one.
Usage: type[Any] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
# Messages of allocators for which torch raises no OutOfMemoryError: torch's on the CPU, CUDA's driver, cuBLAS's
# workspace.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
_REMEDY = (
    "lower -n, --in-flight, --max-new-tokens or --kv-budget, give fewer prompts at once (--limit), or a smaller "
    "--dtype or model"
)


class Interrupted(Exception):
    """The user stopped a run; the message says what is finished and where it is."""


@contextmanager
def at_work(*kinds: type[Exception]) -> Iterator[None]:
    """Count errors of these kinds (default: all) as failures of the work, not of the request: exit status 1, not 2."""
    marked = kinds or (Exception,)
    try:
        yield
    except marked as error:
        setattr(error, _AT_WORK, True)
        raise


@contextmanager
def reported(console: Console | None = None) -> Iterator[None]:
    """Print an error that a user can act on as one line (on standard error unless a console is given), and exit.

    The package's log lines are shown there too.  SIGTERM ends a command as Ctrl-C does.  With
    ``PREFIXKIT_TRACEBACK=1`` errors are raised instead.
    """
    console = console or terminal(stderr=True)
    shown = logging.Handler()
    shown.emit = lambda record: console.print(line(record.getMessage()), soft_wrap=True)  # type: ignore[method-assign]
    log = logging.getLogger("prefixkit")
    log.addHandler(shown)
    try:
        with _terminated_like_interrupted():
            yield
    except (Interrupted, KeyboardInterrupt) as stop:
        console.print(line(("interrupted", "yellow"), f" {stop}".rstrip()), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    except (ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError) as error:
        message = _out_of_memory(error)
        if os.environ.get("PREFIXKIT_TRACEBACK") or (isinstance(error, RuntimeError) and not message):
            raise  # a RuntimeError of another kind is a defect
        code = FAILED if message or getattr(error, _AT_WORK, False) else REFUSED
        say(message or str(error) or type(error).__name__, console)
        raise SystemExit(code) from None
    finally:
        log.removeHandler(shown)


def say(message: str, console: Console) -> None:
    """Print the line of an error."""
    said = " ".join(one.strip(" \t") for one in message.split("\n") if one.strip())  # libraries write paragraphs
    console.print(line(("error:", "red"), f" {said}"), soft_wrap=True)


class Commands(TyperGroup):
    """Reports an error of the command line in one line, not in a box."""

    def main(self, args: Any = None, prog_name: Any = None, *rest: Any, **options: Any) -> Any:
        alone = options.pop("standalone_mode", True)
        options["standalone_mode"] = False
        if not alone:
            return super().main(args, prog_name, *rest, **options)
        try:
            code = super().main(args, prog_name, *rest, **options)
        except Usage as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                typer.echo(error.format_message())
                raise SystemExit(REFUSED) from None
            context = getattr(error, "ctx", None)
            where = "prefixkit" if context is None else context.command_path
            said = " ".join(error.format_message().split())
            say(f"{said} (see {where} --help)", terminal(stderr=True))
            raise SystemExit(REFUSED) from None
        except typer.Abort:
            raise SystemExit(INTERRUPTED) from None
        raise SystemExit(code if isinstance(code, int) else 0)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _out_of_memory(error: Exception) -> str | None:
    """The message for ``error`` if it is a failed allocation, on any device; None for other errors."""
    said = " ".join(str(error).split())
    refused = isinstance(error, RuntimeError) and any(words in said.lower() for words in _NO_MEMORY)
    if not (refused or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)):
        return None
    return f"out of memory ({said or 'no details'}); {_REMEDY}"
