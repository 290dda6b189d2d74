"""The judge as its callers see it: many programs at once, load on the machine, no sandbox."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixkit.evaluation.judge import BadTests, Judge, NoSandbox, Verdict, available, key_of
from prefixkit.evaluation.judge.ends import Judged
from prefixkit.evaluation.judge.sandbox import bubblewrap
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.judge.turns import Turns
from prefixkit.evaluation.tasks.problem import Limits
from tests.evaluation.judge.judging import calls, checks, needs_sandbox, problem, streams

ADD = problem(calls("add", ((1, 2), 3)))
GOOD, BAD = "def add(a, b): return a + b", "def add(a, b): return 0"


class Counting(Judge):
    """A judge without programs: the n-th run of a program comes to the n-th verdict that it was given."""

    def __init__(self, *verdicts: Judged, jobs: int = 2) -> None:
        sandbox = Sandbox(plain=True)
        sandbox.check = lambda: None  # type: ignore[method-assign]
        super().__init__(jobs, sandbox=sandbox)
        self.left, self.ran = list(verdicts), 0

    def _run(self, program: str, problem: Any) -> Judged:
        self.ran += 1
        return self.left.pop(0) if self.left else Judged(Verdict("passed" if program == GOOD else "failed"))


@needs_sandbox()
def test_verdicts_come_with_their_keys() -> None:
    with Judge(jobs=2) as judge:
        found = dict(judge.verdicts([("good", GOOD, ADD), ("bad", BAD, ADD), ("again", GOOD, ADD)]))
    assert {key: one.outcome for key, one in found.items()} == {"good": "passed", "bad": "failed", "again": "passed"}
    assert found["good"].seconds > 0


def test_items_are_taken_as_they_are_needed_and_equal_ones_run_once() -> None:
    taken = []

    def source() -> Any:
        for n in range(1000):
            taken.append(n)
            yield n, f"{GOOD}  # {n // 2}", ADD

    judge = Counting()
    results = judge.verdicts(source())
    next(results)
    assert len(taken) <= 4 * judge.jobs + 1
    results.close()  # type: ignore[attr-defined]
    other = Counting()
    assert len(list(other.verdicts([(n, GOOD, ADD) for n in range(20)]))) == 20
    assert other.ran == 1
    assert len(list(Counting(jobs=10**30).verdicts([(n, GOOD, ADD) for n in range(3)]))) == 3


def test_a_timeout_counts_unless_others_delayed_the_program_and_it_ends_in_time_alone() -> None:
    own, late = Judged(Verdict("timeout")), Judged(Verdict("timeout"), delayed=True)
    for verdicts, outcome, ran in (
        ((late, Judged(Verdict("passed"))), "passed", 2),
        ((late, late), "timeout", 2),
        ((own,), "timeout", 1),
    ):
        judge = Counting(*verdicts)
        assert judge.verdict(GOOD, ADD).outcome == outcome
        assert judge.ran == ran


@pytest.mark.parametrize(("delayed", "runs"), [(True, 2), (False, 1)])
def test_tests_that_others_delayed_are_bad_only_if_they_end_late_alone_too(delayed: bool, runs: int) -> None:
    class Failing(Counting):
        def _run(self, program: str, problem: Any) -> Judged:
            super()._run(program, problem)
            error = BadTests("late")
            error.delayed = delayed
            raise error

    judge = Failing()
    with pytest.raises(BadTests, match=f"{ADD.where}: late"):
        judge.verdict(GOOD, ADD)
    assert judge.ran == runs


class Recording(Judge):
    """A judge that knows how often each program ran."""

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs)
        self.runs: list[str] = []

    def _run(self, program: str, problem: Any) -> Judged:
        self.runs.append(program)
        return super()._run(program, problem)


@needs_sandbox()
def test_programs_that_sleep_past_their_limit_run_once() -> None:
    """The limit is long enough that other tests do not keep a program from the CPU for a tenth of it."""
    sleepers = [f"import time\ntime.sleep(60 + {n})" for n in range(4)]
    with Recording(jobs=4) as judge:
        limited = [(one, one, problem(streams(("", "x")), seconds=3)) for one in sleepers]
        found = dict(judge.verdicts(limited))
        sleeper = "import time\ndef add(a, b): time.sleep(60)"
        found |= dict(judge.verdicts([("f", sleeper, replace(ADD, limits=Limits(seconds=3)))]))
    assert {one.outcome for one in found.values()} == {"timeout"}
    assert len(judge.runs) == 5


@needs_sandbox()
def test_a_program_that_was_kept_from_a_cpu_runs_again_alone() -> None:
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    spin, other = "while True: pass", [sys.executable, "-I", "-S", "-c", "print(flush=True)\nwhile True: pass"]
    # In sessions of their own, as sandboxes are: Linux may divide a CPU by sessions.
    others = [subprocess.Popen(other, stdout=subprocess.PIPE, start_new_session=True) for _ in range(3)]
    try:
        for one in others:
            assert one.stdout is not None
            one.stdout.readline()  # it spins from now on
        with Recording(jobs=1) as judge:
            found = judge.verdict(spin, problem(streams(("", "x")), seconds=0.8))
    finally:
        os.sched_setaffinity(0, everywhere)
        for one in others:
            one.kill()
            one.communicate()
    assert (found.outcome, len(judge.runs)) == ("timeout", 2)


def children(pid: int) -> list[int]:
    return [
        int(child) for path in Path(f"/proc/{pid}/task").iterdir() for child in (path / "children").read_text().split()
    ]


@needs_sandbox()
def test_a_program_whose_sandbox_was_killed_runs_again() -> None:
    before = set(children(os.getpid()))
    with Recording(jobs=1) as judge:
        judge.verdict(BAD, ADD)
        (outer,) = set(children(os.getpid())) - before
        thread = threading.Timer(0.5, lambda: os.kill(children(outer)[0], signal.SIGKILL))
        thread.start()
        found = judge.verdict("import time\ntime.sleep(1)\nprint('x')", problem(streams(("", "x")), seconds=60))
        thread.join()
    assert found.passed, found
    assert len(judge.runs) == 3


def test_alone_is_alone() -> None:
    turns, inside, most = Turns(), [0], [0]
    lock = threading.Lock()

    def run(alone: bool) -> None:
        with turns.turn(alone):
            with lock:
                inside[0] += 100 if alone else 1
                most[0] = max(most[0], inside[0])
            with lock:
                assert not (inside[0] > 100)
                inside[0] -= 100 if alone else 1

    threads = [threading.Thread(target=run, args=(n % 5 == 0,)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == [0] and most[0] == 100


def test_a_key_is_of_all_that_decides_and_of_nothing_else() -> None:
    key = key_of(GOOD, ADD)
    assert len(key) == 64
    others = [
        (BAD, ADD),
        (GOOD, problem(calls("add", ((1, 2), 4)))),
        (GOOD, problem(calls("add", ((1, 2), 3), tolerance=0.1))),
        (GOOD, problem(calls("add", ((1, 2), 3)), seconds=1)),
        (GOOD, problem(checks("assert add(1, 2) == 3", "add"))),
        (GOOD, problem(streams(("1 2", "3")))),
        (GOOD, problem(streams(("1 2", "3")), "cpp")),
    ]
    assert len({key, *(key_of(*other) for other in others)}) == 8
    renamed = ADD.to_json() | {"id": "other", "where": "elsewhere"}
    assert key_of(GOOD, type(ADD).from_json(renamed)) == key


def test_no_bubblewrap_is_an_error_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.executable.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoSandbox, match="apt-get install bubblewrap") as raised:
        available()
    assert isinstance(raised.value, OSError)


@needs_sandbox()
def test_a_bubblewrap_that_cannot_make_namespaces_is_an_error_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, path = bubblewrap.executable(), os.environ["PATH"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        broken = Path(folder, "bwrap")
        broken.write_text(
            f'#!/bin/sh\n[ "$1" = --help ] && exec {real} --help\necho "bwrap: No permissions" >&2\nexit 1\n'
        )
        for made in (broken, broken.parent):
            made.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{path}")
        bubblewrap.executable.cache_clear()
        try:
            with pytest.raises(NoSandbox, match=r"bwrap: No permissions; allow .*kernel.unprivileged_userns_clone"):
                Judge()
        finally:
            bubblewrap.executable.cache_clear()


def test_plain_subprocesses_judge_the_same_after_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        judge = Judge(jobs=1, plain_subprocesses=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "without a sandbox" in caplog.text
    limits = Limits(seconds=1, memory=512)
    assert judge.verdict(GOOD, ADD).passed and not judge.verdict(BAD, ADD).passed
    assert judge.verdict("def f(): return 1", problem(checks("assert f() == 1", "f"))).passed
    assert judge.verdict("print(input())", problem(streams(("a", "a")))).passed
    for program, outcome in (("while True: pass", "timeout"), ("[0] * 10**10", "memory"), ("import os; os.fork()", "")):
        found = judge.verdict(program, problem(streams(("", "x")), seconds=limits.seconds, memory=limits.memory))
        assert found.outcome == (outcome or "failed")


@needs_sandbox()
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests have run as an ordinary user")
@pytest.mark.skipif(not shutil.which("python3", path="/usr/bin"), reason="no Python that every user can read")
def test_an_ordinary_user_can_judge() -> None:
    root = Path(__file__).parents[3]
    if any(not path.stat().st_mode & 0o001 for path in root.parents):
        pytest.skip("an ordinary user cannot read the repository")
    script = (
        "import sys; sys.version_info >= (3, 11) or sys.exit(77)\n"
        "from prefixkit.evaluation.judge import Judge\nfrom prefixkit.evaluation.tasks.problem import Calls, Problem\n"
        "problem = Problem('p', 'w', (), '', tests=Calls('add', (((1, 2), 3),)))\n"
        f"print(Judge(jobs=1).verdict({GOOD!r}, problem).outcome)"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-B", "-c", script],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd=root,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 77:
        pytest.skip("no Python 3.11 that every user can read")
    assert done.stdout == "passed\n", done.stderr


def test_jobs_are_positive() -> None:
    with pytest.raises(ValueError, match="jobs must be positive, not 0"):
        Judge(jobs=0)
