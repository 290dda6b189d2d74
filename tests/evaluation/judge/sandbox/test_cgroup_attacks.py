"""Attacks that a process' own limits do not see: contained with cgroups, successful without them."""

from __future__ import annotations

import os
import select
import textwrap

import pytest

from prefixkit.evaluation.judge.sandbox.process import Process
from prefixkit.evaluation.judge.sandbox.protections import Protections
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.tasks.problem import Limits, Tests
from tests.evaluation.judge.judging import calls, checks, needs_cgroups, streams, verdict
from tests.evaluation.judge.sandbox.test_system_attacks import BEGIN, named

pytestmark = needs_cgroups()

# Of each: protections that would refuse it otherwise, and the body of `waste()`, which takes far more than 96 MiB.
WASTE = {
    "a full /tmp, and pipes": (
        "",
        "import fcntl, os\n"
        "with open('/tmp/full', 'wb') as file:\n    for n in range(60): file.write(bytes(1 << 20))\n"
        "for n in range(50):\n    end = os.pipe()[1]\n    size = fcntl.fcntl(end, 1031, 1 << 20)\n"
        "    os.write(end, bytes(size))\n",
    ),
    "a full /tmp, and sockets": (
        "",
        "import socket\n"
        "with open('/tmp/full', 'wb') as file:\n    for n in range(60): file.write(bytes(1 << 20))\n"
        "kept = [one for n in range(115) for one in socket.socketpair()]\n"
        "for one in kept:\n    one.setblocking(False)\n"
        "    try:\n        while one.send(bytes(1 << 12)): pass\n    except BlockingIOError: pass\n",
    ),
    "memory, and a full /tmp": (
        "",
        "kept = bytes(range(256)) * (100 << 12)\n"
        "with open('/tmp/full', 'wb') as file:\n    for n in range(60): file.write(bytes(1 << 20))\n",
    ),
    "a /tmp without a limit": (
        "disk",
        "with open('/tmp/full', 'wb') as file:\n    for n in range(250): file.write(bytes(1 << 20))\n",
    ),
    "anonymous files": (
        "ipc",
        "import os\nfor n in range(5):\n    end = os.memfd_create('x')\n"
        "    for m in range(50): os.write(end, bytes(1 << 20))\n",
    ),
}
LIMIT = {"a full /tmp, and pipes": 64, "a full /tmp, and sockets": 64, "memory, and a full /tmp": 128}


def waste(name: str) -> str:
    return f"def waste():\n{textwrap.indent(WASTE[name][1], '    ')}\n    return 'wasted'\n"


@pytest.mark.parametrize("name", WASTE)
def test_memory_that_is_no_address_space_is_limited_by_a_cgroup_alone(name: str) -> None:
    others = WASTE[name][0].split()
    memory = LIMIT.get(name, 128)
    found = verdict(f"{waste(name)}print(waste())", streams(("", "wasted")), *others, memory=memory)
    assert (found.outcome, found.detail) == ("memory", f"more than {memory} MiB")
    free = verdict(f"{waste(name)}print(waste())", streams(("", "wasted")), *others, "cgroups", memory=memory)
    assert free.passed, free


TESTS = {
    "streams": streams(("", "wasted")),
    "calls": calls("waste", ((), "wasted")),
    "checks": checks("assert waste() == 'wasted'", "waste"),
}


@pytest.mark.parametrize("kind", TESTS)
def test_a_program_without_memory_left_gets_the_verdict_memory(kind: str) -> None:
    tests: Tests = TESTS[kind]
    source = waste("a full /tmp, and pipes") + ("print(waste())" if kind == "streams" else "")
    found = verdict(source, tests, memory=64)
    assert (found.outcome, found.detail) == ("memory", "more than 64 MiB")
    assert verdict(source, tests, "cgroups", memory=64).passed


def test_memory_beside_the_limit_is_for_the_interpreter_and_not_for_the_program() -> None:
    source = "kept = bytes(range(256)) * (200 << 12)\nprint(len(kept) >> 20)"
    assert verdict(source, streams(("", "200")), memory=256).passed
    found = verdict(source, streams(("", "200")), memory=128)
    assert (found.outcome, found.detail) == ("memory", "more than 128 MiB: MemoryError")


def ran(source: str, *without: str, memory: int) -> Process:
    """A program, ended, in a sandbox that lets it start processes, as the compiler's does."""
    sandbox = Sandbox(Protections(**dict.fromkeys(without, False)))
    spec = {"program": source, "arguments": [], "command": []}
    with sandbox.start("program", spec, Limits(seconds=20, memory=memory), tools=True) as process:
        process.run()
    return process


FORKS = """
import os, signal
made = []
try:
    for n in range(150):
        made.append(os.fork())
        if not made[-1]: signal.pause()
except BlockingIOError:
    print("contained")
else:
    print("escaped")
"""
THREADS = """
import threading
threading.stack_size(65536)
stop = threading.Event()
try:
    for n in range(150): threading.Thread(target=stop.wait, daemon=True).start()
except RuntimeError:
    print("contained")
else:
    print("escaped")
"""


@pytest.mark.parametrize("source", [FORKS, THREADS], ids=["processes", "threads"])
def test_the_number_of_processes_and_threads_is_limited_where_there_may_be_some(source: str) -> None:
    assert bytes(ran(source, memory=512).heard) == b"contained\n"
    assert bytes(ran(source, "cgroups", memory=512).heard) == b"escaped\n"


MANY = """
import os
children, (reading, writing) = [], os.pipe()
for n in range(6):
    children.append(os.fork())
    if not children[-1]:
        os.close(writing)
        kept = bytes(range(256)) * (60 << 12)
        os.read(reading, 1)
        os._exit(0)
    import time; time.sleep(0.1)
os.close(writing)
print("escaped" if all(os.waitpid(child, 0)[1] == 0 for child in children) else "contained")
"""


def test_memory_of_many_processes_is_limited_together() -> None:
    contained, escaped = ran(MANY, memory=128), ran(MANY, "cgroups", memory=128)
    assert contained.excess == "memory"
    assert (escaped.excess, bytes(escaped.heard)) == ("", b"escaped\n")


def test_a_daemon_dies_with_its_cgroup_too() -> None:
    source = BEGIN + textwrap.dedent("""
        ends = os.pipe()
        if not os.fork():
            os.setsid()
            for n in range(3): os.close(n)
            libc.prctl(15, b"NAME", 0, 0, 0)
            os.write(ends[1], b"!")
            import time; time.sleep(20)
        os.read(ends[0], 1)
        print("done")
    """).replace("NAME", f"cg-{os.getpid()}")
    sandbox = Sandbox(Protections(processes=False, pids=False))
    spec = {"program": source, "arguments": [], "command": []}
    with sandbox.start("program", spec, Limits()) as process:
        process.run()
        assert bytes(process.heard) == b"done\n"
        (daemon,) = map(os.pidfd_open, named(f"cg-{os.getpid()}"))
        assert not select.select([daemon], [], [], 0)[0]
    sandbox.close()
    assert select.select([daemon], [], [], 10)[0]
    os.close(daemon)


def test_a_program_does_not_see_its_place_in_the_hierarchy() -> None:
    source = "print('prefixkit' in open('/proc/self/cgroup').read() + open('/proc/self/mountinfo').read())"
    assert verdict(source, streams(("", "False"))).passed
