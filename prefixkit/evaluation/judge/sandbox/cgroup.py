"""A cgroup for each program: limits on all of its memory and processes, more than the process's own limits count.

RLIMIT_AS does not count files of a tmpfs, buffers of pipes and the kernel's data for a process; a cgroup's memory
includes all of these.  A program's process enters its cgroup before it has read anything of the program.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path

from prefixkit.evaluation.judge.sandbox.hierarchy import Hierarchy, NoHierarchy

logger = logging.getLogger(__name__)
_PATIENCE = 5.0  # seconds for the remaining processes of a program to die
_NAME = re.compile(r"prefixkit-(\d+)-(\d+)-(\d+)-\d+")  # PID namespace, PID and start time of the judge, and a number
_TRIAL = 64 << 20  # bytes
_NEARLY = 4 << 20  # bytes; a page that would exceed the limit is not counted, and pages may be large

# For each version, the files of the limits on memory, on memory and swap (optional), and on processes; and the file by
# which a process enters.  In version 1 a thread enters, without the lock that moving a whole process would take.
_LIMIT_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max"),
    2: ("memory.max", "memory.swap.max", "pids.max"),
}
_ENTRANCE = {1: "tasks", 2: "cgroup.procs"}


@dataclass(frozen=True)
class Cgroup:
    """One cgroup, or in version 1 one for each controller.

    Attributes:
        hierarchy: The hierarchy in which it is.
        name: Its name there.
    """

    hierarchy: Hierarchy
    name: str

    @cached_property
    def folders(self) -> tuple[Path, ...]:
        return tuple(folder / self.name for folder in self.hierarchy.folders)

    def settings(self, memory: int | None, processes: int | None) -> list[tuple[Path, int, bool]]:
        """The limits to write: files, values, and whether each file must exist.

        Args:
            memory: Bytes, of which none may be in swap if the kernel accounts for swap; None: no limit.
            processes: The number of processes and threads; None: no limit.
        """
        version = self.hierarchy.version
        limit, swap, pids = _LIMIT_FILES[version]
        found: list[tuple[Path, int, bool]] = []
        if memory is not None:
            folder = self.hierarchy.memory / self.name
            # Version 1 counts memory and swap together, version 2 swap alone.
            found += [(folder / limit, memory, True), (folder / swap, memory if version == 1 else 0, False)]
        if processes is not None:
            found.append((self.hierarchy.pids / self.name / pids, processes, True))
        return found

    def entrances(self) -> list[Path]:
        """The files by which a process enters: it writes 0 to each."""
        return [folder / _ENTRANCE[self.hierarchy.version] for folder in self.folders]

    def ran_out(self) -> bool:
        """Whether a process in it was killed because the cgroup had no memory left.

        The kernel's count of killed processes includes those that were killed because the whole machine was out of
        memory, so the cgroup must also have reached its own limit.
        """
        folder = self.hierarchy.memory / self.name
        if self.hierarchy.version == 2:
            events = _counts(folder / "memory.events")
            return events.get("oom", 0) > 0 and events.get("oom_kill", 0) > 0
        # Not failcnt, which stays 0 in new kernels.
        most = max(_number(folder / f"{name}.max_usage_in_bytes") for name in ("memory", "memory.memsw"))
        reached = most + _NEARLY >= _number(folder / "memory.limit_in_bytes") > 0
        return reached and _counts(folder / "memory.oom_control").get("oom_kill", 0) > 0

    def removed(self) -> bool:
        """Kill all processes in it, and try to remove it; False if that must be tried again."""
        done = True
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.EBUSY:
                    _kill(folder)
                    done = False
                else:
                    logger.warning("the cgroup %s cannot be removed: %s", folder, error.strerror)
        return done


class Cgroups:
    """Makes cgroups, one for each program.

    A killed process leaves its cgroup after some milliseconds, for which no verdict waits: cgroups of ended programs
    are removed when later programs end, the last ones by :meth:`clean`.

    Args:
        hierarchy: Where to make them; cgroups that killed judges left there are removed.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self._numbers = itertools.count()
        pid = os.getpid()
        self._owner = f"prefixkit-{_namespace()}-{pid}-{_started(pid)}"
        self._ended = self._stale()
        self._lock = threading.Lock()
        self.clean()

    @contextmanager
    def made(self, memory: int | None, processes: int | None) -> Iterator[Cgroup]:
        """A new cgroup; afterwards all processes in it are killed, and it is removed soon.

        Args:
            memory: Limit in bytes, or None.
            processes: Limit on processes and threads, or None.

        Raises:
            OSError: the cgroup cannot be made.
        """
        cgroup = Cgroup(self.hierarchy, f"{self._owner}-{next(self._numbers)}")
        try:
            for folder in cgroup.folders:
                folder.mkdir()
            for file, value, needed in cgroup.settings(memory, processes):
                with suppress(*(() if needed else (OSError,))):
                    _write(file, value)
            yield cgroup
        finally:
            self._remove(cgroup)

    def clean(self) -> None:
        """Wait until cgroups of ended programs are gone."""
        until = time.monotonic() + _PATIENCE
        while self._remove():
            if time.monotonic() > until:
                logger.warning("processes in %s do not die", ", ".join(str(one.folders[0]) for one in self._ended))
                return
            time.sleep(0.001)

    def check(self) -> None:
        """Run an empty program in a cgroup.

        Raises:
            NoHierarchy: that cannot be done here; the message says why.
        """
        try:
            with self.made(_TRIAL, 8) as cgroup:
                program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                try:
                    for entrance in cgroup.entrances():
                        _write(entrance, program.pid)
                finally:
                    program.communicate(timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoHierarchy(str(error)) from None

    def _remove(self, *cgroups: Cgroup) -> bool:
        """Try to remove these cgroups, and those that could not be removed before; whether any is left."""
        with self._lock:
            self._ended = [one for one in (*self._ended, *cgroups) if not one.removed()]
            return bool(self._ended)

    def _stale(self) -> list[Cgroup]:
        """The cgroups of judges that are dead."""
        names = {path.name for folder in self.hierarchy.folders for path in folder.iterdir()}
        # This process cannot see whether judges of another PID namespace are alive.
        rows = [found for found in map(_NAME.fullmatch, sorted(names)) if found and int(found[1]) == _namespace()]
        return [Cgroup(self.hierarchy, found[0]) for found in rows if _started(int(found[2])) != int(found[3])]


def _kill(folder: Path) -> None:
    try:
        _write(folder / "cgroup.kill", 1)  # Linux 5.14 and later, version 2
    except OSError:
        with suppress(OSError):
            for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                if pid > 0:  # 0 stands for processes of other namespaces
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def _write(file: Path, value: int) -> None:
    """Write to an existing file of the kernel."""
    with FileIO(os.open(file, os.O_WRONLY), "w") as there:
        there.write(str(value).encode())


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _counts(file: Path) -> dict[str, int]:
    """The counts in a file whose lines are a name and a number."""
    try:
        return {name: int(number) for name, number in (line.split() for line in file.read_text().splitlines())}
    except (OSError, ValueError):
        return {}
