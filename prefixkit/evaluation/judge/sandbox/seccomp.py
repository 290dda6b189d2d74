"""The seccomp filter of a sandbox: a classic BPF program over the system call's number and its first arguments."""

from __future__ import annotations

import errno
import platform
import struct

from prefixkit.evaluation.judge.judge_errors import NoSandbox
from prefixkit.evaluation.judge.sandbox.protections import Protections
from prefixkit.evaluation.judge.sandbox.syscalls import ARCHITECTURES, REFUSED

# linux/filter.h and linux/seccomp.h
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes each, little-endian

_X32 = 0x40000000  # from this number on, x86_64 has every call a second time
_CLONE_THREAD = 0x10000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID, -NET, -TIME
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into a terminal

Instruction = tuple[int, int, int, int]


def seccomp_filter(protections: Protections, machine: str = "") -> bytes:
    """The filter as an array of ``struct sock_filter``, the kernel's format.

    A refused call returns EPERM; ``clone3`` returns ENOSYS, so that libc falls back to ``clone``, whose flags the
    filter can see.  A call of a foreign architecture kills the process.

    Args:
        protections: The protections that are on; they decide which groups of calls are refused.
        machine: The architecture as in ``os.uname().machine``; by default this machine's.

    Raises:
        NoSandbox: the numbers of the calls are not known for this architecture.
    """
    column, arch, own = _architecture(machine or platform.machine())
    program: list[Instruction] = [(_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL)]
    program.append((_LOAD, 0, 0, _NUMBER))
    if arch == ARCHITECTURES["x86_64"][1]:
        program += [(_JUMP_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for group, calls in REFUSED.items():
        if getattr(protections, group):
            for numbers in calls.values():
                program += _refuse(numbers[column], errno.EPERM)
    if protections.processes or protections.namespaces:
        program += _refuse(own["clone3"], errno.ENOSYS)
    flags: list[Instruction] = []
    if protections.namespaces:
        flags += [(_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    if protections.processes:  # only threads
        flags += [(_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    program += _by_argument(own["clone"], 0, flags)
    requests = [step for request in _TERMINAL_INPUT for step in _refuse(request, errno.EPERM)]
    program += _by_argument(own["ioctl"], 1, requests)
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def clone_number() -> int:
    """The number of the call that makes a process in new namespaces.

    Raises:
        NoSandbox: as :func:`seccomp_filter`.
    """
    return _architecture(platform.machine())[2]["clone"]


def _architecture(machine: str) -> tuple[int, int, dict[str, int]]:
    if machine not in ARCHITECTURES:
        raise NoSandbox(f"the sandbox knows the system calls of {', '.join(ARCHITECTURES)}, not of {machine!r}")
    return ARCHITECTURES[machine]


def _refuse(number: int | None, error: int) -> list[Instruction]:
    return [] if number is None else [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]


def _by_argument(number: int, place: int, steps: list[Instruction]) -> list[Instruction]:
    """The filter of a call that one of its arguments decides: ``steps`` refuse by it; else the call is allowed."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * place), *steps, (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_EQUAL, 0, len(body), number), *body]
