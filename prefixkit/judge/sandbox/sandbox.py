"""Starts programs in sandboxes."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from io import FileIO
from typing import Any

from prefixkit.judge.errors import NoSandbox
from prefixkit.judge.sandbox import bubblewrap
from prefixkit.judge.sandbox.cgroup import Cgroup, Cgroups
from prefixkit.judge.sandbox.ground import Ground, make_ground
from prefixkit.judge.sandbox.guests import BOOT, guest
from prefixkit.judge.sandbox.hierarchy import find_hierarchy
from prefixkit.judge.sandbox.process import NotStarted, Process, wait
from prefixkit.judge.sandbox.protections import EVERY, FAR, THREADS, Protections
from prefixkit.judge.sandbox.rlimits import MIB, rlimits
from prefixkit.judge.sandbox.seccomp import seccomp_filter
from prefixkit.tasks.problem import Limits

logger = logging.getLogger(__name__)
_REMEDY = (
    "allow user namespaces (`sysctl kernel.unprivileged_userns_clone=1`, or where AppArmor restricts them "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in a container `--security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined`), or judge on another machine"
)
_BESIDE = 32  # MiB that a cgroup has beside a program's limit: for bubblewrap, and for what the kernel keeps
_TABLES = 256  # one part of as many of a limit is for page tables, which take 8 bytes for 4 KiB
_BUBBLEWRAP = 8  # processes
_made: Ground | None = None
_making = threading.Lock()


def _ground() -> Ground:
    """Made once, and held for as long as the process lives."""
    global _made
    with _making:
        if _made is None:
            _made = make_ground(bubblewrap.interpreter()[1])
        return _made


@cache
def _looked() -> Cgroups | None:
    try:
        found = Cgroups(find_hierarchy())
        found.check()
    except OSError as error:
        logger.info("programs run without cgroups, memory is limited by address space alone: %s", error)
        return None
    atexit.register(found.clean)
    logger.info("each program has a cgroup in %s", " and ".join(map(str, found.hierarchy.folders)))
    return found


def cgroups() -> Cgroups | None:
    """What makes this process' cgroups; None where it may make none.  Looked for once, and said in the log."""
    with _making:
        return _looked()


class Sandbox:
    """Makes sandboxes.

    Args:
        protections: What they protect from.
        plain: Plain subprocesses with limits instead, which protect from nothing that a program does on purpose.
    """

    def __init__(self, protections: Protections = EVERY, plain: bool = False) -> None:
        self.protections, self.plain = protections, plain
        self._filters: dict[Protections, bytes] = {}

    def check(self) -> None:
        """Run an empty program.

        Raises:
            NoSandbox: there can be no sandbox here; the message names the remedy.
        """
        if not self.plain:
            bubblewrap.executable()  # what is missing most often is said first
        try:
            with self.start("program", {"program": "", "arguments": [], "command": []}, Limits()) as process:
                wait([process], lambda: False, process, framed=False)
                if process.status != 0:
                    raise NotStarted(process.errors.decode("utf-8", "replace").strip())
        except NotStarted as error:
            raise NoSandbox(f"no sandbox: {str(error)[-300:]}; {_REMEDY}") from None

    def close(self) -> None:
        """Wait until nothing is left of programs that have ended."""
        if made := self._cgroups():
            made.clean()

    @contextmanager
    def start(
        self,
        name: str,
        spec: Mapping[str, Any],
        limits: Limits,
        files: Mapping[str, bytes] | None = None,
        tools: bool = False,
        stack: int = 64,
    ) -> Iterator[Process]:
        """A program in a sandbox of its own, dead afterwards.

        Args:
            name: Of a guest: see :func:`prefixkit.judge.sandbox.guests.guest`.
            spec: What it is told.  In the lists ``command`` and ``arguments``, names of ``files`` become their paths.
            limits: Of time, memory and output.
            files: Contents of files that it can read, by name.
            tools: Whether it can run the compiler, and other processes.
            stack: MiB.
        """
        protections = replace(self.protections, processes=False) if tools else self.protections
        with ExitStack() as held:
            reading, writing = _pipe(held)
            ready = writing.fileno()
            opened = {key: _memory(held, content) for key, content in (files or {}).items()}
            told = dict(spec)
            for key in {"command", "arguments"} & set(told):
                told[key] = [self._path(word, opened) if word in opened else word for word in told[key]]
            told["limits"] = rlimits(limits, protections, not self.plain, stack)
            told["ready"] = ready
            content = guest(name, told)
            opened["guest"] = _memory(held, content)
            copied = len(content) + sum(map(len, (files or {}).values()))
            cgroup = self._cgroup(limits.memory * MIB + copied, held)
            popen = self._spawn(protections, opened, ready, tools, cgroup, held)
            writing.close()
            seconds = limits.seconds * (1 if protections.time else FAR)
            cap = limits.output * 1024 * (1 if protections.output else FAR)
            process = Process(popen, reading.fileno(), seconds, cap, self.plain, cgroup)
            try:
                yield process
            finally:
                process.close()

    def _cgroups(self) -> Cgroups | None:
        return cgroups() if self.protections.cgroups and not self.plain else None

    def _cgroup(self, memory: int, held: ExitStack) -> Cgroup | None:
        """A cgroup for one sandbox, removed with ``held``.

        Args:
            memory: Bytes of the program's, and of files that are copied into the sandbox.
            held: What ends with the sandbox.
        """
        made = self._cgroups()
        if made is None:
            return None
        try:
            return held.enter_context(
                made.made(
                    memory + memory // _TABLES + _BESIDE * MIB if self.protections.memory else None,
                    THREADS + _BUBBLEWRAP if self.protections.processes else None,
                )
            )
        except OSError as error:
            raise NotStarted(f"a cgroup cannot be made: {error}") from None

    def _spawn(
        self,
        protections: Protections,
        opened: Mapping[str, int],
        ready: int,
        tools: bool,
        cgroup: Cgroup | None,
        held: ExitStack,
    ) -> subprocess.Popen[bytes]:
        python = [bubblewrap.interpreter()[0], "-S", "-s", "-P", "-B", "-c", BOOT, self._path("guest", opened)]
        kept = [*opened.values(), ready]
        if self.plain:
            command = python
        else:
            ground = _ground()
            if protections not in self._filters:
                self._filters[protections] = seccomp_filter(protections)
            seccomp = _memory(held, self._filters[protections])
            told = bubblewrap.arguments(protections, ground, opened, tools)
            options = _memory(held, b"\0".join(arg.encode() for arg in [*told, "--seccomp", str(seccomp)]) + b"\0")
            kept += [seccomp, options]
            entering = cgroup.entering() if cgroup else ()
            command = [*entering, *ground.prefix, bubblewrap.executable(), "--args", str(options), "--", *python]
        environment = dict(bubblewrap.ENVIRONMENT) | (dict(os.environ) if not protections.environment else {})
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=kept,
            start_new_session=self.plain,
            cwd=held.enter_context(tempfile.TemporaryDirectory(prefix="judge-")) if self.plain else "/",
            bufsize=0,
        )

    def _path(self, name: str, opened: Mapping[str, int]) -> str:
        return f"/dev/fd/{opened[name]}" if self.plain else f"{bubblewrap.INSIDE}/{name}"


def _memory(held: ExitStack, content: bytes) -> int:
    """A file in memory, closed with ``held``."""
    descriptor = os.memfd_create("judge")
    held.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _pipe(held: ExitStack) -> tuple[FileIO, FileIO]:
    reading, writing = os.pipe()
    return held.enter_context(FileIO(reading, "rb")), held.enter_context(FileIO(writing, "wb"))
