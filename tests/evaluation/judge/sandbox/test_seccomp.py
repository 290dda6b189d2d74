"""The filter, run by an interpreter of its few instructions, on both architectures."""

from __future__ import annotations

import errno
import struct

import pytest

from prefixkit.evaluation.judge import NoSandbox
from prefixkit.evaluation.judge.sandbox.protections import Protections
from prefixkit.evaluation.judge.sandbox.seccomp import seccomp_filter
from prefixkit.evaluation.judge.sandbox.syscalls import ARCHITECTURES, REFUSED

ALLOW, KILL = "allow", "kill"


def run(program: bytes, number: int, arch: int, *arguments: int) -> str | int:
    """What a filter says to a call: allowed, killed, or an errno."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("<HBBI", program))
    at, value = 0, 0
    while True:
        operation, yes, no, k = code[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("<I", data, k)
        elif operation == 0x06:
            return ALLOW if k == 0x7FFF0000 else KILL if k == 0x80000000 else k & 0xFFFF
        else:
            at += yes if {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[operation] else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_named_call_is_refused_unless_its_protection_is_off(machine: str) -> None:
    column, arch, _ = ARCHITECTURES[machine]
    full = seccomp_filter(Protections(), machine)
    assert len(full) // 8 < 4096
    for group, calls in REFUSED.items():
        without = seccomp_filter(Protections(**{group: False}), machine)
        for name, numbers in calls.items():
            if numbers[column] is not None:
                assert run(full, numbers[column], arch) == errno.EPERM, name
                assert run(without, numbers[column], arch) == ALLOW, name


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_clone_makes_threads_and_nothing_else(machine: str) -> None:
    _, arch, own = ARCHITECTURES[machine]
    full = seccomp_filter(Protections(), machine)
    thread = 0x3D0F00
    assert run(full, own["clone"], arch, thread) == ALLOW
    assert run(full, own["clone"], arch, 17) == errno.EPERM
    assert run(full, own["clone"], arch, thread | 0x10000000) == errno.EPERM
    assert run(full, own["clone3"], arch) == errno.ENOSYS
    forking = seccomp_filter(Protections(processes=False), machine)
    assert run(forking, own["clone"], arch, 17) == ALLOW
    assert run(forking, own["clone"], arch, 17 | 0x20000) == errno.EPERM


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_ordinary_calls_are_allowed_and_foreign_ones_kill(machine: str) -> None:
    _, arch, own = ARCHITECTURES[machine]
    full = seccomp_filter(Protections(), machine)
    read = {"x86_64": 0, "aarch64": 63}[machine]
    assert run(full, read, arch) == ALLOW
    assert run(full, own["ioctl"], arch, 0, 0x5413) == ALLOW
    assert run(full, own["ioctl"], arch, 0, 0x5412) == errno.EPERM
    assert run(full, read, 0x40000003) == KILL
    if machine == "x86_64":
        assert run(full, 0x40000000 + read, arch) == KILL


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(NoSandbox, match="not of 's390x'"):
        seccomp_filter(Protections(), "s390x")
