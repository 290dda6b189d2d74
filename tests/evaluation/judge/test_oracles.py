"""What programs come to where a solution says what is right, and what a solution that does not run comes to."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkit.evaluation.judge import BadTests
from prefixkit.evaluation.tasks.problem import Oracle
from tests.evaluation.judge.judging import calls, checks, needs_sandbox, streams, verdict

pytestmark = needs_sandbox()


def oracle(solution: str, *inputs: Any, **options: Any) -> Oracle:
    return Oracle("f", f"def f(x):\n    {solution}\n", tuple((one,) for one in inputs), **options)


@pytest.mark.parametrize("expected, found, outcome", [
    ("inf", "inf", "passed"),
    ("inf", "5.0", "failed"),
    ("inf", "-inf", "failed"),
    ("-inf", "-1e308", "failed"),
    ("5.0", "inf", "failed"),
    ("nan", "nan", "passed"),
    ("nan", "5.0", "failed"),
    ("5.0", "nan", "failed"),
    ("1.0", "1.0000005", "passed"),
    ("1.0", "1.00001", "failed"),
])  # fmt: skip
def test_floats_are_equal_within_a_tolerance_and_infinity_equals_itself_alone(expected, found, outcome):
    for tolerance in (0.0, 1e-6):
        tests = oracle(f"return [float('{expected}')]", 1, tolerance=tolerance)
        assert verdict(f"def f(x): return [float('{found}')]", tests).outcome == outcome


def test_a_solution_that_calls_itself_does_not_call_the_candidate() -> None:
    tests = oracle("return f(x - 1) + 1 if x else 0", 0, 3)
    assert verdict("def f(x): return x", tests).passed
    assert verdict("def f(x): return x + 7", tests).outcome == "failed"
    tests = oracle("return 2 * x", 3, accept="found == f(*arguments)")
    assert verdict("def f(x): return 6", tests).passed
    assert verdict("def f(x): return 7", tests).outcome == "failed"


BAD = {
    "line 2 of the solution: ZeroDivisionError": oracle("return 1 / x", 1, 0),
    "line 2 of the solution: NameError": oracle("return missing", 1),
    "line 2 of the solution: SystemExit": oracle("raise SystemExit(0)", 1),
    "SyntaxError": oracle("return (", 1),
    "their setup ended by timeout: more than 1 s": oracle("\n    while True: pass", 1),
    "their setup ended by error: exit status 0": oracle("import os; os._exit(0)", 1),
    "line 1 of adapt: NameError": oracle("return x", 1, adapt="missing"),
    "line 1 of accept: NameError": oracle("return x", 1, accept="missing == found"),
    "line 1 of accept: TypeError": oracle("return x", 1, accept="len(expected) == len(found)"),
}


@pytest.mark.parametrize("said", BAD)
def test_a_solution_that_does_not_run_is_no_verdict(said: str) -> None:
    with pytest.raises(BadTests, match=f"problems.jsonl:1: the tests do not run: .*{said}"):
        verdict("def f(x): return x", BAD[said], seconds=1)


@pytest.mark.parametrize("program, outcome", [
    ("def f(x): return missing", "error"),
    ("def f(x): return None", "failed"),
    ("def f(x): return object()", "failed"),
    ("import sys\ndef f(x): sys.exit(0)", "error"),
    ("import os\ndef f(x): os._exit(0)", "error"),
    ("def f(x):\n    while True: pass", "timeout"),
    ("import time\ntime.sleep(0.999)\ndef f(x):\n    while True: pass", "timeout"),
    ("import time\ntime.sleep(60)", "timeout"),
    ("import threading\nfor _ in range(9):\n    threading.Thread(target=lambda: f(1)).start()\n"
     "def f(x):\n    while True: pass", "timeout"),
    ("x = (", "invalid"),
])  # fmt: skip
def test_a_candidate_that_does_not_run_has_a_verdict(program: str, outcome: str) -> None:
    tests = oracle("return [x]", 1, accept="sum(found) == sum(expected)")
    assert verdict(program, tests, seconds=1).outcome == outcome


def test_a_solution_may_return_what_cannot_be_copied() -> None:
    tests = oracle("return iter(range(x))", 3, accept="list(found) == list(expected)")
    assert verdict("def f(x): return list(range(x))", tests).passed
    assert verdict("def f(x): return [0]", tests).outcome == "failed"


def test_tests_may_begin_with_a_byte_order_mark() -> None:
    program, mark = "def f(x): return x", "\ufeff"
    assert verdict(program, checks(f"{mark}assert f(k) == 1", "f", setup=f"{mark}k = 1")).passed
    assert verdict(program, Oracle("f", f"{mark}{program}", ((1,),))).passed
    assert verdict("print(1)", streams(("", ""), checker=f"{mark}pass")).passed


@pytest.mark.parametrize("given", ["\ufb01t", "fit"])
@pytest.mark.parametrize("defined", ["\ufb01t", "fit"])
def test_names_are_those_that_python_reads_however_they_are_spelt(given: str, defined: str) -> None:
    program = f"def {defined}(x): return x"
    for tests in (
        Oracle(given, f"def {given}(x): return x", ((1,),)),
        calls(given, ((1,), 1)),
        checks(f"assert {given}(1) == 1", given),
    ):
        assert verdict(program, tests).passed
