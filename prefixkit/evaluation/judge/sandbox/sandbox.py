"""Starts programs in sandboxes."""

from __future__ import annotations

import atexit
import logging
import marshal
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache
from io import FileIO
from typing import Any

from prefixkit.evaluation.judge.judge_errors import NoSandbox
from prefixkit.evaluation.judge.sandbox import bubblewrap
from prefixkit.evaluation.judge.sandbox.cgroup import Cgroup, Cgroups
from prefixkit.evaluation.judge.sandbox.ground import ground
from prefixkit.evaluation.judge.sandbox.hierarchy import find_hierarchy
from prefixkit.evaluation.judge.sandbox.process import NotStarted, Process
from prefixkit.evaluation.judge.sandbox.protections import EVERY, FAR, THREADS, Protections
from prefixkit.evaluation.judge.sandbox.rlimits import MIB, rlimits, thread_stack
from prefixkit.evaluation.judge.sandbox.seccomp import clone_number, seccomp_filter
from prefixkit.evaluation.judge.sandbox.warm_interpreter import FILES, Zygote, in_memory
from prefixkit.evaluation.tasks.problem import Limits

logger = logging.getLogger(__name__)
_REMEDY = (
    "allow user namespaces (`sysctl kernel.unprivileged_userns_clone=1`, or where AppArmor restricts them "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in a container `--security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined`), have bubblewrap 0.6 or later, or judge on another machine"
)
_BESIDE = 32  # MiB of a cgroup above a program's limit: for the process that watches it, and for the kernel's data
_TABLES = 256  # 1/_TABLES of a limit is added for page tables, which take 8 bytes for 4 KiB
_BESIDE_PROCESSES = 8
_looking = threading.Lock()


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
    """The maker of this process' cgroups; None if it may make none.  It is looked for once, and the log names it."""
    with _looking:
        return _looked()


class Sandbox:
    """Makes sandboxes.

    Args:
        protections: The protections that are on.
        plain: Use plain subprocesses with limits instead, which do not protect from malicious programs.
    """

    def __init__(self, protections: Protections = EVERY, plain: bool = False) -> None:
        self.protections, self.plain = protections, plain
        self._zygotes: dict[tuple[Protections, bool], Zygote] = {}
        self._lock = threading.Lock()

    def check(self) -> None:
        """Run an empty program.

        Raises:
            NoSandbox: no sandbox can be made on this machine; the message names the remedy.
        """
        if not self.plain:
            bubblewrap.executable()  # the most frequent cause is reported first
        try:
            with self.start("program", {"program": ""}, Limits()) as process:
                process.run()
                if process.status != 0:
                    raise NotStarted(process.errors)
        except NotStarted as error:
            raise NoSandbox(f"no sandbox: {str(error)[-300:]}; {_REMEDY}") from None

    def close(self) -> None:
        """Wait until all processes of ended programs are gone; no program may be running."""
        with self._lock:
            while self._zygotes:
                self._zygotes.popitem()[1].close()
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
        """A program in a sandbox of its own, which is killed afterwards.

        Args:
            name: The guest's name: ``answering``, ``testing`` or ``program``.
            spec: The guest's arguments, of types that ``marshal`` takes.  In the lists ``command`` and ``arguments``,
                names of ``files`` become their paths; a ``program`` is also written to a file.
            limits: Limits of time, memory and output.
            files: Contents of files that it can read, by name.
            tools: Whether it can run the compiler, and other processes.
            stack: MiB of the main thread's stack.
        """
        protections = replace(self.protections, processes=False) if tools else self.protections
        with ExitStack() as held:
            there = dict(files or {}) | {FILES[name]: spec.get("program", "").encode("utf-8", "surrogatepass")}
            folder = bubblewrap.INSIDE
            if self.plain:
                folder = held.enter_context(tempfile.TemporaryDirectory(prefix="judge-"))
            told = {**spec, "guest": name, "folder": folder, "path": f"{folder}/{FILES[name]}", "files": there}
            for key in {"command", "arguments"} & set(told):
                told[key] = [f"{folder}/{word}" if word in there else word for word in told[key]]
            told["limits"] = rlimits(limits, protections, not self.plain, stack)
            told["thread_stack"] = thread_stack(limits)
            content = marshal.dumps(told)
            cgroup = self._cgroup(limits.memory * MIB + len(content), held)
            pipes = [_pipe(held) for _ in range(4)]
            ours, theirs = zip(pipes[0][::-1], *pipes[1:], strict=True)  # we write to the first
            if not self.plain:
                for pipe in theirs[:3]:
                    os.fchown(pipe.fileno(), ground().user, -1)  # so that it can open /dev/stdin
            given = [*theirs, held.enter_context(in_memory(content))]
            given += [held.enter_context(FileIO(entrance, "w")) for entrance in (cgroup.entrances() if cgroup else ())]
            pidfd = self._forked(protections, tools, [file.fileno() for file in given])
            for pipe in theirs:
                pipe.close()
            seconds = limits.seconds * (1 if protections.time else FAR)
            cap = limits.output * 1024 * (1 if protections.output else FAR)
            grouped = self.plain or not protections.pids
            with closing(Process(pidfd, ours, seconds, cap, name != "program", grouped, cgroup)) as process:
                yield process

    def _cgroups(self) -> Cgroups | None:
        return cgroups() if self.protections.cgroups and not self.plain else None

    def _cgroup(self, memory: int, held: ExitStack) -> Cgroup | None:
        """A cgroup for one sandbox, removed with ``held``.

        Args:
            memory: Bytes of the program's memory, and of files that are copied into the sandbox.
            held: The exit stack that ends with the sandbox.
        """
        made = self._cgroups()
        if made is None:
            return None
        try:
            return held.enter_context(
                made.made(
                    memory + memory // _TABLES + _BESIDE * MIB if self.protections.memory else None,
                    THREADS + _BESIDE_PROCESSES if self.protections.processes else None,
                )
            )
        except OSError as error:
            raise NotStarted(f"a cgroup cannot be made: {error}") from None

    def _forked(self, protections: Protections, tools: bool, given: Sequence[int]) -> int:
        warm = self._zygote(protections, tools)
        try:
            return warm.fork(given)
        except NotStarted:
            if warm.alive:
                raise
            return self._zygote(protections, tools).fork(given)  # the first zygote was killed

    def _zygote(self, protections: Protections, tools: bool) -> Zygote:
        """The zygote for these protections, made at its first use, and again after its end."""
        with self._lock:
            found = self._zygotes.get((protections, tools))
            if found is None or not found.alive:
                found = self._zygotes[protections, tools] = self._made(protections, tools)
                weakref.finalize(self, found.close)
            return found

    def _made(self, protections: Protections, tools: bool) -> Zygote:
        environment = dict(bubblewrap.ENVIRONMENT) | (dict(os.environ) if not protections.environment else {})
        if self.plain:
            return Zygote((), {"clone": clone_number(), "namespaces": 0}, environment)
        told = {
            "clone": clone_number(),
            "namespaces": bubblewrap.namespaces(protections),
            "mounts": bubblewrap.mounts(protections),
            "sealing": bubblewrap.SEALING,
            "nesting": not protections.namespaces,
            "filter": seccomp_filter(protections),
        }
        return Zygote(bubblewrap.command(protections, tools), told, environment)


def _pipe(held: ExitStack) -> tuple[FileIO, FileIO]:
    reading, writing = os.pipe()
    return held.enter_context(FileIO(reading, "rb")), held.enter_context(FileIO(writing, "wb"))
