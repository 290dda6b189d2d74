"""The judge: programs and problems in, verdicts out."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from typing import Self, TypeVar

from prefixkit.evaluation.judge.ends import Judged, Over
from prefixkit.evaluation.judge.judge_errors import BadTests, NoSandbox
from prefixkit.evaluation.judge.keys import key_of
from prefixkit.evaluation.judge.kinds.by_tests import judge_checks
from prefixkit.evaluation.judge.kinds.calls import judge_calls
from prefixkit.evaluation.judge.kinds.oracle import as_checks
from prefixkit.evaluation.judge.kinds.streams import judge_streams
from prefixkit.evaluation.judge.sandbox.process import NotStarted
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.judge.turns import Turns
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Calls, Checks, Oracle, Problem, Streams

logger = logging.getLogger(__name__)
Key = TypeVar("Key")
_AHEAD = 4  # waiting programs for each running one


def available() -> None:
    """Try whether sandboxes can be made on this machine.

    Raises:
        NoSandbox: none can be made; the message names the remedy.
    """
    Sandbox().check()


class Judge:
    """Runs candidate programs and gives verdicts that they cannot forge.

    A program that exceeds its time, and had to wait for a CPU or for the judge, runs once more, alone, so that load on
    the machine decides no verdict.  Equal programs with equal tests run once.  Several threads may use a judge; the
    process that makes it must not fork while it judges.

    Args:
        jobs: Programs that run at once; by default one for each CPU.
        plain_subprocesses: Run programs without a sandbox, for machines where none can be made: a program can then
            read and delete files, and forge its verdict.
        sandbox: Replaces the default sandbox; for tests.

    Raises:
        NoSandbox: no sandbox can be made on this machine; the message names the remedy.
        ValueError: ``jobs`` is not positive.
    """

    def __init__(
        self,
        jobs: int | None = None,
        *,
        plain_subprocesses: bool = False,
        sandbox: Sandbox | None = None,
    ) -> None:
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs must be positive, not {jobs}")
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self._sandbox = sandbox or Sandbox(plain=plain_subprocesses)
        if self._sandbox.plain:
            logger.warning("programs run without a sandbox: they can read and delete files, and forge their verdicts")
        self._sandbox.check()
        self._known: dict[str, Verdict] = {}
        self._turns = Turns()
        self._running: dict[str, threading.Lock] = {}  # held while the verdict of a key is found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._sandbox.close()

    def verdict(self, program: str, problem: Problem) -> Verdict:
        """The verdict on a program.

        Raises:
            ValueError: the problem has no tests, tests that its language cannot have, or tests that do not run.
            NoCompiler: the program is in C++, and this machine has no compiler.
            NoSandbox: a sandbox could not be made.
        """
        key = key_of(program, problem)
        if problem.language == "cpp" and not isinstance(problem.tests, Streams):
            kind = type(problem.tests).__name__.lower()
            raise ValueError(f"{problem.where}: programs in C++ are judged by streams, not by {kind}")
        with self._running.setdefault(key, threading.Lock()):
            if key not in self._known:
                self._known[key] = self._judged(program, problem)
        return self._known[key]

    def verdicts(
        self,
        items: Iterable[tuple[Key, str, Problem]],
        on_bad_tests: Callable[[Key, BadTests], None] | None = None,
    ) -> Iterator[tuple[Key, Verdict]]:
        """Verdicts on programs, each with the key of its item, in the order in which they are reached.

        Items are taken as they are needed, at most ``4 * jobs`` ahead.  If the caller stops early, running programs
        are still judged, and waiting ones are not.

        Args:
            items: Key, program and problem of each.
            on_bad_tests: Called with the key of a program whose problem's tests do not run, or cannot judge programs;
                the program gets no verdict.  None: the error is raised.

        Raises:
            The errors of :meth:`verdict`.
        """
        pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="judge")
        source = (
            (pool.submit(self.verdict, program, problem), (key, problem.where)) for key, program, problem in items
        )
        pending: dict[Future[Verdict], tuple[Key, str]] = {}
        try:
            while True:
                pending.update(islice(source, min(_AHEAD * self.jobs, sys.maxsize) - len(pending)))
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    key, where = pending.pop(future)
                    try:
                        verdict = future.result()
                    except OSError:  # no sandbox, no compiler, or a lack of some resource
                        raise
                    except Exception as error:  # however bad a problem's tests are, the others are judged
                        if on_bad_tests is None:
                            raise
                        on_bad_tests(key, error if isinstance(error, BadTests) else _bad(where, error))
                    else:
                        yield key, verdict
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _judged(self, program: str, problem: Problem) -> Verdict:
        for alone in (False, True):
            with self._turns.turn(alone):
                began = time.monotonic()
                try:
                    judged = self._run(program, problem)
                except BadTests as error:
                    if alone or not error.delayed:
                        raise BadTests(f"{problem.where}: {error}") from None
                    continue
                seconds = time.monotonic() - began
            if not judged.delayed:
                break
        return replace(judged.verdict, seconds=round(seconds, 4))

    def _run(self, program: str, problem: Problem) -> Judged:
        tests = problem.tests
        assert tests is not None
        if isinstance(tests, Oracle):
            tests = as_checks(tests)
        try:
            if isinstance(tests, Checks):
                return judge_checks(self._sandbox, program, tests, problem.limits)
            if isinstance(tests, Calls):
                return judge_calls(self._sandbox, program, tests, problem.limits)
            return judge_streams(self._sandbox, program, problem.language, tests, problem.limits)
        except Over as over:
            return over.judged
        except NotStarted as error:
            raise NoSandbox(f"{problem.where}: a sandbox could not be made: {error}") from None


def _bad(where: str, error: Exception) -> BadTests:
    said = str(error).removeprefix(f"{where}: ")
    return BadTests(f"{where}: cannot be judged by ({type(error).__name__}: {said})")
