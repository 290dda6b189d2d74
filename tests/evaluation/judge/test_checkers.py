"""What checkers decide, and what a checker that does not run comes to."""

from __future__ import annotations

import pytest

from prefixkit.evaluation.judge import BadTests
from tests.evaluation.judge.judging import judge, needs_sandbox, problem, streams, verdict

pytestmark = needs_sandbox()


def test_a_checker_decides_in_a_sandbox_of_its_own() -> None:
    checker = """
import sys
given, expected, output = (open(path).read().split() for path in sys.argv[1:])
assert expected == ["any"]
assert int(output[0]) * int(output[1]) == int(given[0])
"""
    tests = streams(("12", "any"), ("15", "any"), checker=checker)
    assert verdict("n = int(input())\nd = 3\nprint(d, n // d)", tests).passed
    assert verdict("input()\nprint(3, 4)", tests).case == 1
    assert verdict("import sys\nprint('sys.exit(0)')", tests).case == 0


def test_a_checker_that_does_not_parse_is_no_verdict_whatever_the_candidate_writes() -> None:
    with pytest.raises(BadTests, match=r"problems.jsonl:1: the checker does not run: SyntaxError"):
        verdict("print(1)", streams(("", ""), checker="def"))
    evaluates = "import sys\ncompile(open(sys.argv[3]).read(), 'output', 'exec')"
    assert verdict("print('def')", streams(("", ""), checker=evaluates)).case == 0


READS = "import sys\nfound = open(sys.argv[3]).read()\n"
BROKEN = {
    "ModuleNotFoundError: No module named 'absent'": "import absent",
    "NameError: name 'missing' is not defined": f"{READS}missing(found)",
    "IndexError: list index out of range": f"import sys\nfound = open(sys.argv[4]).read()\n{READS}",
    "FileNotFoundError": f"known = open('/tmp/known').read()\n{READS}",
    "ValueError: invalid literal": f"import sys\nint(open(sys.argv[2]).read())\n{READS}",
    "RuntimeError: broken": "raise RuntimeError('broken')",
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_checker_that_fails_whatever_the_candidate_writes_is_no_verdict(said: str) -> None:
    tests = streams(("", "any"), checker=BROKEN[said])
    for program in ("print(1)", "pass", "print('any')"):
        with pytest.raises(BadTests, match=f"problems.jsonl:1: the checker does not run: {said}"):
            verdict(program, tests)


@pytest.mark.parametrize("expected", ["7", "any", ""])
@pytest.mark.parametrize("program", ["print('x')", "pass", "print('any')"])
@pytest.mark.parametrize("checks", [
    "assert found.strip() == '7'",
    "assert int(found) == 7",
    "assert int(found.split()[0]) == 7",
    "assert eval(found) == 7",
    "for line in found.splitlines(): last = int(line)\nassert last == 7",
    "import re\nassert re.match('7', found).group()",
    "if found.strip() != '7': raise ValueError('wrong')",
    "if found.strip() != '7': sys.exit('wrong')",
])  # fmt: skip
def test_a_checker_may_refuse_by_an_exception(checks: str, program: str, expected: str) -> None:
    tests = streams(("", expected), checker=READS + checks)
    assert verdict(program, tests).outcome == "failed"
    assert verdict("print(7)", tests).passed


def test_other_problems_are_judged_where_a_checker_does_not_run() -> None:
    tests = streams(("", "1"), checker="import absent"), streams(("", "1"))
    bad: list[int] = []
    items = [(number, "print(1)", problem(one)) for number, one in enumerate(tests)]
    found = dict(judge().verdicts(items, lambda key, error: bad.append(key)))
    assert bad == [0] and found[1].passed and len(found) == 1
