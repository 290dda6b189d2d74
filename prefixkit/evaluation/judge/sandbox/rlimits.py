"""The kernel's limits on a process, which a program in a sandbox sets before anything else."""

from __future__ import annotations

import math
import platform
import re
import resource

from prefixkit.evaluation.judge.sandbox.protections import DISK_MIB, FAR, THREADS, Protections
from prefixkit.evaluation.tasks.problem import Limits

MIB = 1 << 20
_FILES = 256
_PAGES = 1 << 16  # bytes, the largest page of any machine
_SIGNALS = 1024  # pending signals, and timers, which the kernel counts by user
_THREAD_STACK = 8 * MIB  # the usual default; memory reserved for a stack counts as memory of the program


def rlimits(limits: Limits, protections: Protections, namespaced: bool, stack: int) -> list[list[int]]:
    """Rows of resource, soft limit, hard limit, as in ``resource.setrlimit``.

    Args:
        limits: The limits of the run.
        protections: The protections that are on.
        namespaced: Whether the process has a user namespace of its own: processes are counted in there alone.
        stack: MiB of the main thread's stack.
    """
    seconds = math.ceil(limits.seconds) * (1 if protections.time else FAR)
    rows = [
        [resource.RLIMIT_CORE, 0, 0],
        [resource.RLIMIT_NOFILE, _FILES, _FILES],
        [resource.RLIMIT_CPU, seconds, seconds + 1],
        [resource.RLIMIT_STACK, stack * MIB, stack * MIB],
        [resource.RLIMIT_SIGPENDING, _SIGNALS, _SIGNALS],
    ]
    if protections.disk:
        rows.append([resource.RLIMIT_FSIZE, DISK_MIB * MIB, DISK_MIB * MIB])
    if protections.memory:
        rows.append([resource.RLIMIT_AS, limits.memory * MIB, limits.memory * MIB])
    kernel = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]
    # Older kernels count a user's processes on the whole machine, not by user namespace.
    if protections.processes and namespaced and kernel >= [5, 14]:
        rows.append([resource.RLIMIT_NPROC, THREADS, THREADS])
    return rows


def thread_stack(limits: Limits) -> int:
    """Bytes of a thread's stack unless a program chooses them: all stacks together take a quarter of its memory."""
    return min(_THREAD_STACK, limits.memory * MIB // (4 * THREADS)) // _PAGES * _PAGES
