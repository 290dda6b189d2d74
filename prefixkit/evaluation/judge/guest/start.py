"""The start of every program in a sandbox: its limits, and its channel to the judge."""

import builtins
import os
import resource
import sys
from _sitebuiltins import Quitter
from typing import Any

from prefixkit.evaluation.judge.wire import framed

READY = 3  # the descriptor to which a program writes that it starts, and its parent how it ended


def begin(spec: dict[str, Any]) -> None:
    """Tell the judge that the program starts, which starts its clock, then set the limits."""
    os.write(READY, b"!")
    os.close(READY)
    for kind, soft, hard in spec["limits"]:
        most = resource.getrlimit(kind)[1]
        bound = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, bound), bound))
    # Python runs without `site`, which would define these two.
    for name in ("exit", "quit"):
        setattr(builtins, name, Quitter(name, "Ctrl-D (i.e. EOF)"))
    sys.argv = [spec["path"]]


def without_mark(source: str) -> str:
    """A program without the byte order mark that CPython accepts at the start of its file, and `compile` does not."""
    return source.removeprefix("\ufeff")


class Channel:
    """Messages from and to the judge, over the original standard input and output.

    The program gets an empty standard input, and its standard output joins its standard error.
    """

    def __init__(self) -> None:
        self._in, self._out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        with open("/dev/null", "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def send(self, content: bytes) -> None:
        self._out.write(framed(content))
        self._out.flush()

    def receive(self) -> bytes:
        """The next message; at the end of the channel the process ends."""
        return self._exactly(int.from_bytes(self._exactly(4), "big"))

    def _exactly(self, size: int) -> bytes:
        found = self._in.read(size)
        if len(found) < size:
            os._exit(0)
        return found
