"""The judge's side of a warm interpreter, which forks the process of each program."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from prefixkit.judge.sandbox.process import START, NotStarted


class Zygote:
    """A process that forks those of programs; all of them end with it, and it ends where its socket is closed.

    Args:
        command: Its command.
        control: The two ends of its socket, of which it inherits the second.
        kept: Other descriptors that it inherits.
        environment: All of it.
    """

    def __init__(
        self,
        command: Sequence[str],
        control: tuple[socket.socket, socket.socket],
        kept: Sequence[int],
        environment: Mapping[str, str],
    ) -> None:
        self._control, theirs = control
        self._control.settimeout(START)
        self._lock = threading.Lock()
        with theirs:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                pass_fds=[theirs.fileno(), *kept],
                start_new_session=True,
                cwd="/",
            )

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def fork(self, descriptors: Sequence[int]) -> int:
        """A process for a program, as a descriptor of it.

        Args:
            descriptors: Its standard input, output and error, the pipe that says how it goes, a file with what it is
                told, and the files by which it enters cgroups.

        Raises:
            NotStarted: there is none.
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
        """End it, and with it all that it has forked; what it wrote to standard error."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired, ValueError):
            return self._popen.communicate(timeout=START)[1]
        return b""
