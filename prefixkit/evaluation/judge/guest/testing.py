"""The guest in the tests' own sandbox: runs the tests with functions that call the candidate through the judge."""

import builtins
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prefixkit.evaluation.judge.guest.start import Channel, begin, without_mark
from prefixkit.evaluation.judge.wire import Opaque, Reader, WireError, write

_PARTS = ("the setup", "the solution", "adapt", "accept")  # names of code other than the tests' own


class Candidate:
    """The candidate as the tests see it.

    Attributes:
        raised: The last exception of the candidate, as it was raised here.
        remote: The class of values that stay in the candidate's process.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._turn = channel, threading.Lock()
        self.raised: BaseException | None = None
        asked = self

        class Remote(Opaque):
            """A value in the candidate's process: it can be passed back and called, and has attributes."""

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return asked.ask(["get", self, name, None])

            def __call__(self, *arguments: Any, **options: Any) -> Any:
                return asked.ask(["call", self, list(arguments), options])

        self.remote = Remote

    def function(self, name: str) -> Callable[..., Any]:
        """One of the candidate's functions."""

        def candidate(*arguments: Any, **options: Any) -> Any:
            return self.ask(["call", name, list(arguments), options])

        candidate.__name__ = candidate.__qualname__ = name
        return candidate

    def ask(self, question: list[Any]) -> Any:
        """The candidate's result; arguments that it changed in place are changed here too.  Threads take turns.

        Raises:
            Exception: the candidate's exception, as the nearest builtin type.
        """
        arguments, options = question[2:]
        message = b"?" + write(question)
        with self._turn:
            self._channel.send(message)
            answer = self._channel.receive()
        kind, *rest, changed = Reader(answer, opaque=self.remote).value()
        for place, new in changed:
            _changed(arguments[place] if isinstance(place, int) else options[place], new)
        if kind == "returned":
            return rest[0]
        name, given, _ = rest
        self.raised = raised = _exception(name, given)
        raise raised

    def tell(self, verdict: list[str]) -> None:
        """Send the verdict, while no thread waits for an answer."""
        with self._turn:
            self._channel.send(b"." + write(verdict))


def _exception(name: str, arguments: list[Any]) -> Exception:
    kind = getattr(builtins, name, Exception)
    if kind is StopIteration:  # would silently end a loop of the tests
        kind = RuntimeError
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = Exception
    try:
        return kind(*arguments)
    except Exception:
        return Exception(*arguments)


def _changed(old: Any, new: Any) -> Any:
    """A value equal to the new one: the old one, changed in place, if it is a container of the same type."""
    if type(old) is not type(new):
        return new
    if isinstance(old, (list, tuple)):
        items = [_changed(a, b) for a, b in zip(old, new, strict=False)] + list(new[len(old) :])
        if isinstance(old, tuple):
            return tuple(items)
        old[:] = items
    elif isinstance(old, dict):
        made = {key: _changed(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(made)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    else:
        return new
    return old


def _line(error: BaseException, path: str) -> str:
    """An exception, with its line in the tests, whose file is ``path``, or in what they need."""
    where, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file == path or file in _PARTS:
            where = f"line {trace.tb_lineno} of {'the tests' if file == path else file}: "
        trace = trace.tb_next
    text = ""
    with suppress(Exception):
        text = str(error)[:200]
    return f"{where}{type(error).__name__}{': ' if text else ''}{text}"


def main(spec: dict[str, Any]) -> None:
    """Run the tests' setup, say that it has run, wait until the candidate is loaded, run the tests, send their verdict.

    The tests are the module ``__main__``, so that they may end by ``unittest.main()``.
    """
    channel, path = Channel(), spec["path"]
    begin(spec)
    module = sys.modules["__main__"] = type(sys)("__main__")
    scope = module.__dict__
    scope["__file__"] = path
    try:
        code = compile(without_mark(spec["program"]), path, "exec")
        exec(compile(without_mark(spec["setup"]), "the setup", "exec"), scope)
    except BaseException as error:
        channel.send(b"." + write(["broken", _line(error, path)]))
        return
    candidate = Candidate(channel)
    candidate.tell(["ready", ""])
    try:
        _, names = Reader(channel.receive(), opaque=candidate.remote).value()
        for name in spec["names"]:  # and no others, whatever names the candidate reports
            scope[name] = candidate.function(name) if names[name][0] == "function" else names[name][1]
        exec(code, scope)
    except WireError as error:
        verdict = ["failed", f"the candidate's answer cannot be read: {error}"]
    except SystemExit as end:  # of the tests' own: candidates raise none here
        well = end.code is None or (isinstance(end.code, int) and end.code == 0)
        verdict = ["passed", ""] if well else ["failed", _line(end, path)]
    except BaseException as error:
        verdict = ["error" if error is candidate.raised else "failed", _line(error, path)]
    else:
        verdict = ["passed", ""]
    candidate.tell(verdict)
    os._exit(0)  # skips the interpreter's teardown, which takes longer than its start
