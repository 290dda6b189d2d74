"""The guest in the candidate's process: loads the candidate, and answers calls of its functions.

The candidate can reach everything here, and this code need not be trusted: by changing it the candidate only chooses
its own answers.
"""

import builtins
import sys
from contextlib import suppress
from typing import Any

from prefixkit.evaluation.judge.guest.start import Channel, begin, without_mark
from prefixkit.evaluation.judge.wire import Reader, WireError, write

_BUILTIN = {
    kind: name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)
}
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_MOST_KEPT = 100_000  # values to which the tests may refer


class Answering:
    """The candidate's module, and the values that it keeps for the tests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: list[Any] = []
        self.module = type(sys)("candidate")
        sys.modules["candidate"] = self.module

    def load(self, source: str, path: str, names: tuple[str, ...]) -> None:
        """Run the candidate's module, and send what each of the names is."""
        self.module.__file__ = path
        try:
            code = compile(without_mark(source), path, "exec")
        except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
            self._say("invalid", f"{type(error).__name__}: {error}")
            return
        try:
            exec(code, self.module.__dict__)
        except BaseException as error:
            self._say("raised", *_described(error))
            return
        self._say("loaded", {name: self._kind(name) for name in names})

    def _kind(self, name: str) -> Any:
        """("missing",), ("function",), or ("value", value)."""
        if name.partition(".")[0] not in self.module.__dict__:
            return ("missing",)
        if "." in name:
            return ("function",) if callable(self._named(name, make=False)) else ("missing",)
        value = self.module.__dict__[name]
        return ("function",) if callable(value) else ("value", value)

    def answer(self, message: bytes) -> None:
        """Answer one call, or one look-up of an attribute."""
        kind, target, arguments, options = Reader(message, find=self._kept.__getitem__).value()
        if kind == "get":
            self._call(getattr, [target, arguments], {}, changes=False)
        else:
            function = self._named(target) if isinstance(target, str) else target
            self._call(function, arguments, options, changes=kind == "call")

    def _named(self, name: str, make: bool = True) -> Any:
        head, _, method = name.partition(".")
        found = self.module.__dict__[head]
        if not method:
            return found
        return getattr(found() if make else found, method, None)

    def _call(self, function: Any, arguments: list[Any], options: dict[str, Any], changes: bool) -> None:
        given: list[tuple[int | str, Any]] = [*enumerate(arguments), *options.items()] if changes else []
        given = [(place, value) for place, value in given if not isinstance(value, _SCALARS)]
        before = [_written(value) for _, value in given]
        try:
            result = function(*arguments, **options)
        except BaseException as error:
            answer: list[Any] = ["raised", *_described(error)]
        else:
            answer = ["returned", result]
        changed = [(place, value) for (place, value), old in zip(given, before, strict=True) if old != _written(value)]
        self._say(*answer, changed)

    def _say(self, *message: Any) -> None:
        try:
            content = write(list(message), self._keep)
        except (WireError, MemoryError, RecursionError) as error:
            content = write(["unfit", f"{type(error).__name__}: {error}"])
        except BaseException as error:
            content = write(["raised", *_described(error), []])
        self._channel.send(content)

    def _keep(self, value: Any) -> int:
        if len(self._kept) >= _MOST_KEPT:
            raise WireError(f"more than {_MOST_KEPT} values of other types")
        self._kept.append(value)
        return len(self._kept) - 1


def _written(value: Any) -> bytes:
    """Bytes that differ if a value has changed; iterators, which reading would use up, count as unchanged."""
    if isinstance(value, (list, dict, set, bytearray, tuple)):
        with suppress(Exception):
            return write(value)
    return b""


def _described(error: BaseException) -> list[Any]:
    """An exception's nearest builtin type, its arguments if they are scalars, and a line about it."""
    kind = type(error)
    builtin = next((_BUILTIN[base] for base in type.mro(kind) if base in _BUILTIN), "Exception")
    text = ""
    with suppress(BaseException):
        text = str(error)[:1000]
    arguments = [text]
    with suppress(BaseException):
        if kind in _BUILTIN and all(type(item) in _SCALARS for item in error.args) and len(write(error.args)) < 1000:
            arguments = list(error.args)
    return [builtin, arguments, f"{kind.__name__}: {text}"]


def main(spec: dict[str, Any]) -> None:
    """Load the program, then answer messages until the channel ends."""
    channel = Channel()
    begin(spec)
    answering = Answering(channel)
    answering.load(spec["program"], spec["path"], spec["names"])
    while True:
        message = channel.receive()
        try:
            answering.answer(message)
        except BaseException as error:
            answering._say("raised", *_described(error), [])
