"""The judge's side of a warm interpreter, which forks the process of each program.

The judge compiles the guest modules, so that the sandbox needs no readable file of prefixkit.
"""

from __future__ import annotations

import marshal
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

from prefixkit.evaluation.judge.sandbox.ground import interpreter
from prefixkit.evaluation.judge.sandbox.process import START, NotStarted

_JUDGE = Path(__file__).parents[1]
_PARTS = ("wire", "guest.start", "guest.answering", "guest.testing", "guest.program", "guest.zygote")
FILES = {"answering": "candidate.py", "testing": "tests.py", "program": "program.py"}  # file of each guest's program

# Runs as `python -c BOOT descriptor`: makes modules from a file, then forks, and continues as each program's process.
BOOT = """
import marshal, sys
with open(int(sys.argv[1]), "rb") as file:
    modules, spec = marshal.load(file)
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
del file, name, code, modules
spec = module.serve(spec)
sys.modules["prefixkit.evaluation.judge.guest." + spec["guest"]].main(spec)
"""


class Zygote:
    """A process that forks the programs' processes, which all end with it; it ends when its socket is closed.

    Args:
        before: The part of its command before the interpreter.
        told: The spec of :func:`prefixkit.evaluation.judge.guest.zygote.serve`, except for the socket.
        environment: All environment variables.
    """

    def __init__(self, before: Sequence[str], told: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START)
        self._lock = threading.Lock()
        with theirs, in_memory(marshal.dumps((_modules(), {**told, "control": theirs.fileno()}))) as file:
            self._popen = subprocess.Popen(
                [*before, interpreter()[0], "-S", "-s", "-P", "-B", "-c", BOOT, str(file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                pass_fds=[theirs.fileno(), file.fileno()],
                start_new_session=True,
                cwd="/",
            )

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def fork(self, descriptors: Sequence[int]) -> int:
        """Fork a process for a program; returns its pidfd.

        Args:
            descriptors: Its standard input, output and error, the pipe that reports its start and end, a file with its
                spec, and the files by which it enters cgroups.

        Raises:
            NotStarted: no process was forked.
        """
        message, found = b"", list[int]()
        with self._lock, suppress(OSError):
            socket.send_fds(self._control, [b"!"], descriptors)
            message, found, _, _ = socket.recv_fds(self._control, 1000, 1)
        if found:
            os.set_inheritable(found[0], False)
            return found[0]
        if not message:
            message = self.close()
        raise NotStarted(message.decode("utf-8", "replace").strip())

    def close(self) -> bytes:
        """End it, and with it all processes that it forked; returns its standard error."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired, ValueError):
            return self._popen.communicate(timeout=START)[1]
        return b""


def in_memory(content: bytes) -> FileIO:
    """A file in memory, at its beginning."""
    file = FileIO(os.memfd_create("judge"), "r+")
    file.write(content)
    file.seek(0)
    return file


@cache
def _modules() -> tuple[tuple[str, Any], ...]:
    found = []
    for part in _PARTS:
        path = _JUDGE.joinpath(*part.split(".")).with_suffix(".py")
        found.append(
            (f"prefixkit.evaluation.judge.{part}", compile(path.read_text(), f"{part}.py", "exec", dont_inherit=True))
        )
    return tuple(found)
