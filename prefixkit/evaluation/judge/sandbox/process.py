"""A process in a sandbox, and messages between it and the judge, which never waits beyond a deadline."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from typing import Literal

from prefixkit.evaluation.judge import wire
from prefixkit.evaluation.judge.sandbox.cgroup import Cgroup

Excess = Literal["", "timeout", "memory", "output"]
MESSAGE = 16 << 20  # bytes of one message
_CHUNK = 1 << 16
_TAIL = 4096  # last bytes of standard error that are kept
START = 60.0  # seconds within which a sandbox must start


class NotStarted(OSError):
    """The sandbox ended before the program in it began."""


class Process:
    """One sandbox and the processes in it, which are all dead once it is closed.

    Args:
        pidfd: Descriptor of the process that watches the program; when it ends, all processes in the sandbox end.
        pipes: The judge's ends of its standard input, output and error, and of the pipe that reports start and end.
        seconds: Limit on wall time, from when the program begins.
        cap: The most bytes of output.
        framed: Whether its standard output is messages, which are read one at a time and do not count against ``cap``.
        grouped: Whether that process leads a group of processes that no namespace ends with it.
        cgroup: The cgroup in which it is.

    Attributes:
        excess: The limit that it exceeded, after which it is dead.
        status: Its exit status once it has ended, negative if a signal ended it; None before.
        heard: Its standard output that was not taken yet, at most one message.
        cpu: Seconds of CPU time that it and its descendants had used when it was measured.
        starved: Seconds that they may have waited for a CPU or for the judge by then: in the run queue, and until the
            judge last read or wrote something; infinite if the kernel does not say.
    """

    def __init__(
        self,
        pidfd: int,
        pipes: Sequence[FileIO],
        seconds: float,
        cap: int,
        framed: bool,
        grouped: bool,
        cgroup: Cgroup | None = None,
    ) -> None:
        self._pidfd, self._stdin, self._cgroup = pidfd, pipes[0], cgroup
        self._group = max(_pid(pidfd), 0) if grouped else 0
        self._in, self._out, self._err, self._ready = (pipe.fileno() for pipe in pipes)
        for pipe in pipes:
            os.set_blocking(pipe.fileno(), False)
        self._seconds, self._cap, self._written, self._framed = seconds, cap, 0, framed
        self._begun, self._open = False, {self._out, self._err, self._ready}
        self._deadline = time.monotonic() + START
        self._unsent: memoryview = memoryview(b"")
        self._close_in = False
        self._moved = self.cpu = self.starved = 0.0
        self.excess: Excess = ""
        self.status: int | None = None
        self._errors = b""
        self.heard = bytearray()

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        return self._errors.decode("utf-8", "replace").strip()

    @property
    def complete(self) -> bool:
        """Whether a whole message has been read."""
        return self._framed and not self._missing()

    def send(self, content: bytes) -> None:
        """Send a message; bytes that do not fit into the pipe now are written while the judge waits for something."""
        self._unsent = memoryview(bytes(self._unsent) + wire.framed(content))
        self._moved = time.monotonic()
        self._write()

    def run(self, given: bytes = b"") -> None:
        """Send all of standard input, and wait until the program has ended or exceeded a limit."""
        self._unsent, self._close_in = memoryview(given), True
        self._write()
        wait([self], self)

    def message(self) -> bytes:
        """Take the message, which has been read whole."""
        content = bytes(self.heard[4:])
        self.heard.clear()
        return content

    def interests(self, listen: bool) -> list[tuple[int, int]]:
        """Descriptors and events to poll for; those of standard output only if ``listen``."""
        found = [(one, select.POLLIN) for one in (self._pidfd, *self._open) if listen or one != self._out]
        return [*found, (self._in, select.POLLOUT)] if self._unsent else found

    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def turn(self, happened: dict[int, int]) -> None:
        """Act on the events that :func:`select.poll` found, and on the deadline."""
        if self._ready in happened:
            self._hear_ready()
        if happened.keys() & {self._in, self._out, self._err}:
            self._moved = time.monotonic()
        if self._in in happened:
            self._write()
        if self._err in happened:
            self._read_errors()
        if self._out in happened and not self.excess:
            while self._read_output() and self._framed:
                pass
        if self.excess:
            return
        if self._pidfd in happened:
            self._end()
        elif self.left() <= 0:
            if not self._begun:
                self.close()
                raise NotStarted(f"a sandbox has not started within {START:.0f} s; give the judge fewer jobs")
            self._exceed("timeout")

    def measure(self) -> None:
        """Measure ``cpu`` and ``starved``, unless it has ended."""
        if self._pidfd >= 0 and (pid := _pid(self._pidfd)) > 0:
            self.cpu, waited = times(pid)
            self.starved = waited + max(0.0, self._moved - self._deadline + self._seconds - self.cpu)

    def close(self) -> None:
        """Kill all processes in the sandbox, and release its resources in the judge."""
        if self._pidfd < 0:
            return
        with suppress(ProcessLookupError, PermissionError):
            if self._group:
                os.killpg(self._group, signal.SIGKILL)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        dead = select.poll()
        dead.register(self._pidfd, select.POLLIN)
        dead.poll()
        os.close(self._pidfd)
        self._pidfd = -1

    def _hear_ready(self) -> None:
        self._open.discard(self._ready)
        if os.read(self._ready, 1) == b"!":  # else it is the exit status of a program that could not begin
            self._begun = True
            self._moved = time.monotonic()
            self._deadline = self._moved + self._seconds

    def _write(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._in, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the program has closed its end
            self._unsent = memoryview(b"")
        if self._close_in:
            self._stdin.close()

    def _read_errors(self) -> bool:
        more = self._some(self._err, _CHUNK, counted=True)
        self._errors = (self._errors + more)[-_TAIL:]
        return bool(more)

    def _missing(self) -> int:
        """How many bytes the message lacks, as far as its length is known."""
        size = int.from_bytes(self.heard[:4], "big") if len(self.heard) >= 4 else 0
        return 4 + size - len(self.heard)

    def _read_output(self) -> bool:
        size = self._missing() if self._framed else _CHUNK
        if size > MESSAGE:
            self._exceed("output")
            return False
        more = self._some(self._out, min(size, _CHUNK), counted=not self._framed) if size else b""
        self.heard += more
        return bool(more)

    def _some(self, descriptor: int, size: int, counted: bool) -> bytes:
        """The bytes that can be read now; ``counted``: they count as output."""
        with suppress(BlockingIOError):
            more = os.read(descriptor, size)
            if not more:
                self._open.discard(descriptor)
            self._written += len(more) * counted
            if self._written > self._cap:
                self._exceed("output")
            return more
        return b""

    def _exceed(self, excess: Excess) -> None:
        self.excess = excess
        self.measure()
        self.close()
        self.status = -signal.SIGKILL

    def _end(self) -> None:
        """Read the rest after its end; only without a sandbox may other processes of the program hold pipes open."""
        for read in (self._read_errors, self._read_output):
            while not self.excess and read():
                pass
        if self.excess:
            return
        if not self._begun:
            self._hear_ready()
        told = self._some(self._ready, 2, counted=False) if self._begun else b""
        self.status = int.from_bytes(told, "big", signed=True) if told else -signal.SIGKILL
        self.starved = 0.0 if told else math.inf  # its watching process was killed, which no program can do
        self.close()
        if not self._begun:
            raise NotStarted(self.errors or "the sandbox ended before the program began")
        if self._cgroup is not None and self._cgroup.ran_out():
            self.excess = "memory"


def wait(processes: Sequence[Process], speaking: Process) -> None:
    """Let processes run until a message is complete, or one of them has ended or exceeded a limit.

    Args:
        processes: All running processes; their standard error is read all the time.
        speaking: The process whose standard output is read.

    Raises:
        NotStarted: a sandbox could not be made.
    """
    while not speaking.complete and not any(process.ended for process in processes):
        poll = select.poll()
        for process in processes:
            for descriptor, events in process.interests(process is speaking):
                poll.register(descriptor, events)
        timeout = max(0.0, min(process.left() for process in processes))
        happened = dict(poll.poll(timeout * 1000 + 1))
        for process in processes:
            if not process.ended:
                process.turn(happened)


def times(pid: int) -> tuple[float, float]:
    """Seconds of CPU time of a process and its living descendants, and seconds that their threads waited for a CPU.

    The second is infinite if the kernel does not say.
    """
    ticks, waited, pending = 0, 0.0, [pid]
    while pending:
        one = pending.pop()
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{one}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            for thread in os.listdir(f"/proc/{one}/task"):
                waited += _waited(f"/proc/{one}/task/{thread}")
                with open(f"/proc/{one}/task/{thread}/children", "rb") as file:
                    pending += map(int, file.read().split())
    return ticks / os.sysconf("SC_CLK_TCK"), waited


def _waited(thread: str) -> float:
    """Seconds in the run queue."""
    try:
        with open(f"{thread}/schedstat", "rb") as file:
            ran, waited, _ = map(int, file.read().split())
    except FileNotFoundError:
        return 0.0 if not os.path.exists(thread) else math.inf
    return waited / 1e9 if ran else math.inf  # a kernel that does not count says 0


def _pid(pidfd: int) -> int:
    """The number of a process; -1 if it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line[4:]) for line in file if line.startswith("Pid:"))
