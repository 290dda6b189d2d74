"""What ordinary programs come to, by each kind of tests."""

from __future__ import annotations

import pytest

from prefixkit.evaluation.judge import BadTests, Verdict
from tests.evaluation.judge.judging import calls, checks, needs_sandbox, problem, streams, verdict
from tests.evaluation.judge.judging import judge as a_judge

pytestmark = needs_sandbox()

ADD = calls("add", ((1, 2), 3), ((5, 5), 10))


def outcome(found: Verdict) -> tuple[str, int | None]:
    return found.outcome, found.case


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def add(a, b): return a + b", ("passed", None)),
        ("\ufeffdef add(a, b): return a + b", ("passed", None)),
        ("\ufeff\ufeffdef add(a, b): return a + b", ("invalid", None)),
        ("def add(a, b): return 3", ("failed", 1)),
        ("def add(a, b): return a + b if a < 5 else 1 / 0", ("error", 1)),
        ("def add(a, b): return [0] * 10 ** 10", ("memory", 0)),
        ("def add(a, b):\n  while True: pass", ("timeout", 0)),
        ("while True: pass", ("timeout", None)),
        ("def add(a, b) return", ("invalid", None)),
        ("x = '\0'", ("invalid", None)),
        ("def sub(a, b): pass", ("invalid", None)),
        ("import no_such_module", ("error", None)),
        ("import sys; sys.exit(0)", ("error", None)),
        ("import os; os.kill = 0; import ctypes; ctypes.string_at(0)", ("crashed", None)),
    ],
)
def test_calls(program: str, expected: tuple[str, int | None]) -> None:
    assert outcome(verdict(program, ADD, seconds=1)) == expected


def test_calls_of_a_method_make_an_object_for_each() -> None:
    program = """
        class Solution:
            def __init__(self): self.seen = 0
            def count(self, x):
                self.seen += 1
                return self.seen
    """
    assert verdict(program, calls("Solution.count", (("a",), 1), (("b",), 1))).passed
    assert verdict(program, calls("Solution.missing", (("a",), 1))).outcome == "invalid"


def test_calls_take_tuples_for_lists_and_numbers_within_tolerance() -> None:
    program = "def f(x): return (1, 2.0000001, {'a': (x,)})"
    assert verdict(program, calls("f", ((1,), [1, 2.0, {"a": [1]}]), tolerance=1e-6)).passed
    assert outcome(verdict(program, calls("f", ((1,), [1, 2.0, {"a": [1]}])))) == ("failed", 0)


def test_a_module_may_use_dataclasses_typing_and_its_own_name() -> None:
    program = """
        from __future__ import annotations
        from dataclasses import dataclass
        import pickle
        @dataclass
        class P:
            x: int = 1
        def f(a): return pickle.loads(pickle.dumps(P(a))).x
        if __name__ == "__main__": raise SystemExit
    """
    assert verdict(program, calls("f", ((4,), 4))).passed


SORTS = checks("a = [3, 1, 2]\nassert sort(a) is None\nassert a == [1, 2, 3]", "sort")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def sort(a): a.sort()", "passed"),
        ("def sort(a): a = sorted(a)", "failed"),
        ("def sort(a): return sorted(a)", "failed"),
        ("def sort(a): a[5]", "error"),
        ("def sort(a):\n  while True: pass", "timeout"),
        ("sort = 3", "failed"),
        ("sort", "error"),
        ("sort = ", "invalid"),
        ("", "invalid"),
    ],
)
def test_checks(program: str, expected: str) -> None:
    assert verdict(program, SORTS, seconds=1).outcome == expected


HELPERS = """
    rows = [[1, 2], [3]]
    inner = rows[0]
    assert change(rows, extra={'k': {1}}) == 2
    assert rows == [[0, 1, 2], [3], [9]] and rows[0] is inner
    assert LIMIT == 7 and helper(1) == 2
    try:
        fail('x')
    except KeyError as error:
        assert error.args == ('x', 3)
    else:
        assert False
    try:
        own()
    except ValueError as error:
        assert str(error) == 'mine'
    assert list(count(3)) == [0, 1, 2] and next(iter(count(2))) == 0
    assert [x for _, x in zip(range(3), forever())] == [0, 1, 2]
    assert total([Pair(1, 2), Pair(3, 4)]) == 10 and Pair(1, 2).sum() == 3
    assert adder(3)(4) == 7
    assert values() == [None, True, 1, 2.5, 1j, 'x', b'y', (1,), {2}, frozenset({3}), {'a': [1]}, range(3)]
    assert list(keys()) == ['a'] and keys() == {'a'}
    assert surrogate('\\ud800') == '\\ud800!'
    assert not plain_object() == plain_object()
"""


def test_checks_see_the_candidate_as_if_it_were_theirs() -> None:
    program = """
        import itertools
        LIMIT = 7
        def change(rows, extra):
            rows[0].insert(0, 0)
            rows.append([9])
            return len(extra) + 1
        def fail(x): raise KeyError(x, 3)
        class Own(ValueError): pass
        def own(): raise Own('mine')
        def count(n): yield from range(n)
        def forever(): return itertools.count()
        class Pair:
            def __init__(self, a, b): self.a, self.b = a, b
            def sum(self): return self.a + self.b
        def total(pairs): return sum(pair.sum() for pair in pairs)
        def adder(n): return lambda x: x + n
        def values():
            return [None, True, 1, 2.5, 1j, 'x', b'y', (1,), {2}, frozenset({3}), {'a': [1]}, range(3)]
        def keys(): return {'a': 1}.keys()
        def surrogate(s): return s + '!'
        def plain_object(): return object()
    """
    names = [
        "LIMIT",
        "change",
        "fail",
        "own",
        "count",
        "forever",
        "Pair",
        "total",
        "adder",
        "values",
        "keys",
        "surrogate",
        "plain_object",
    ]
    found = verdict(program, checks(HELPERS, *names, setup="def helper(x): return x + 1"))
    assert found.passed, found


def test_a_failed_check_names_its_line() -> None:
    found = verdict("def f(): return 1", checks("x = 1\nassert f() == 2, 'wrong'", "f"))
    assert found.detail == "line 2 of the tests: AssertionError: wrong"


def test_tests_that_do_not_run_are_no_verdict() -> None:
    for tests in (checks("assert", "f"), checks("assert f()", "f", setup="1 / 0")):
        with pytest.raises(BadTests, match=r"problems.jsonl:1: the tests do not run: .*Error"):
            verdict("def f(): return 1", tests)


UNITTEST = """
    import unittest
    class Test(unittest.TestCase):
        def test(self): self.assertEqual(f(), 1)
"""


@pytest.mark.parametrize(
    ("end", "right", "wrong"),
    [
        (f"{UNITTEST}    unittest.main()", "passed", "failed"),
        (f"{UNITTEST}    if __name__ == '__main__': unittest.main()", "passed", "failed"),
        ("import sys\nassert f() == 1\nsys.exit(0)", "passed", "failed"),
        ("import sys\nsys.exit(f() != 1)", "passed", "failed"),
        ("import sys\nsys.exit(None if f() == 1 else 'wrong')", "passed", "failed"),
        ("import sys\nf()\nsys.exit(0.0)", "failed", "failed"),
    ],
)
def test_checks_that_exit_with_status_0_are_passed(end: str, right: str, wrong: str) -> None:
    assert verdict("def f(): return 1", checks(end, "f")).outcome == right
    assert verdict("def f(): return 2", checks(end, "f")).outcome == wrong
    assert not verdict("import sys\ndef f(): sys.exit(0)", checks(end, "f")).passed
    assert not verdict("import sys\ndef f(): return 2\nsys.exit(0)", checks(end, "f")).passed


DOUBLE = streams(("2\n", "4\n"), ("5\n", "10\n"))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(2 * int(input()))", ("passed", None)),
        ("\ufeffprint(2 * int(input()))", ("passed", None)),
        ("import sys\nfor line in sys.stdin: print(int(line) * 2, end='\\r\\n')", ("passed", None)),
        ("print(2 * int(open(0).read()))\nexit()", ("passed", None)),
        ("def main():\n  print(2 * int(input()))\nif __name__ == '__main__': main()", ("passed", None)),
        ("import threading\nt = threading.Thread(target=lambda: print(2 * int(input())))\nt.start()", ("passed", None)),
        ("print(4)", ("failed", 1)),
        ("input()\nprint(4)\n1 / 0", ("error", 0)),
        ("print(2 * int(input()))\nquit(3)", ("error", 0)),
        ("print(2 * int(input()", ("invalid", 0)),
        ("x = [0] * 10 ** 10", ("memory", 0)),
        ("print('x' * 10 ** 7)", ("output", 0)),
        ("import time; time.sleep(600)", ("timeout", 0)),
        ("input(); input()", ("error", 0)),
        ("import sys; sys.exit(200)", ("error", 0)),
        ("pass", ("failed", 0)),
        ("import signal; signal.raise_signal(11)", ("crashed", 0)),
    ],
)
def test_streams(program: str, expected: tuple[str, int | None]) -> None:
    seconds = 0.3 if expected[0] == "timeout" else 60  # those that end have the time for it on any machine
    assert outcome(verdict(program, DOUBLE, seconds=seconds)) == expected


def test_large_input_and_output_meet_no_deadlock() -> None:
    text = "x" * 3_000_000
    echo = "import sys\nfor line in sys.stdin: sys.stdout.write(line)"
    assert verdict(echo, streams((text, text), compare="exact")).passed
    assert verdict("print('no')", streams((text, "no"))).passed


def test_equal_programs_give_equal_verdicts_whatever_the_seed_of_hashes() -> None:
    assert verdict("print(hash('x') % 97)", streams(("", "x"))).detail
    details = {a_judge().verdict(f"print(hash('x') % 997)\n#{n}", problem(streams(("", "x")))).detail for n in range(3)}
    assert len(details) == 1


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ValueError, match=r"problems.jsonl:1: problem 'p' has no tests"):
        a_judge().verdict("", problem(None))
    for tests, kind in ((ADD, "calls"), (SORTS, "checks")):
        with pytest.raises(ValueError, match=rf"C\+\+ are judged by streams, not by {kind}"):
            a_judge().verdict("", problem(tests, "cpp"))


def test_a_limit_below_what_the_interpreter_has_is_the_programs() -> None:
    assert verdict("x = [0] * 10**6", DOUBLE, memory=8).outcome in ("memory", "error", "crashed")


# Programs, each of which prints "yes" to the input "hello" as a process without a sandbox.
ORDINARY = {
    "open /dev/stdin": "print('yes' if open('/dev/stdin').read() == 'hello' else 'no')",
    "open /dev/fd/0": "print('yes' if open('/dev/fd/0').read() == 'hello' else 'no')",
    "open /dev/stdout": "open('/dev/stdout', 'w').write('yes')",
    "write to /dev/fd/1 and /dev/stderr": "open('/dev/stderr', 'w').write('no')\nopen('/dev/fd/1', 'w').write('yes')",
    "read its own file": "import sys\nassert sys.argv == [__file__]\n"
    "print('yes' if 'own file' in open(__file__).read() else 'no')  # own file",
    "read its own source": "import inspect\ndef f():\n    return 1  # one\nclass A:\n    x = 2  # two\n"
    "assert '# one' in inspect.getsource(f) and '# two' in inspect.getsource(A)\nprint('yes')",
    "show lines of a traceback": "import traceback\ntry:\n    1 / 0  # here\nexcept ZeroDivisionError:\n"
    "    print('yes' if '# here' in traceback.format_exc() else 'no')",
    "change builtins": "__builtins__.say = print\nsay('yes')",
    "a pool of threads": "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(32) as pool:\n"
    "    print('yes' if sum(pool.map(lambda n: time.sleep(0.01) or n, range(64))) == 2016 else 'no')",
    "a thread with a large stack": "import sys, threading\nthreading.stack_size(64 << 20)\n"
    "sys.setrecursionlimit(10**6)\n"
    "def f(n): return f(n - 1) if n else print('yes')\nthreading.Thread(target=f, args=(50000,)).start()",
    "asyncio": "import asyncio\nasync def main():\n    return await asyncio.to_thread(lambda: 'yes')\n"
    "print(asyncio.run(main()))",
    "signals": "import signal, time\ndef alarm(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, alarm)\n"
    "assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    "try: time.sleep(60)\nexcept TimeoutError: print('yes')",
    "temporary files": "import tempfile\nwith tempfile.NamedTemporaryFile('w') as file:\n"
    "    with tempfile.TemporaryDirectory():\n        file.write('x')\nprint('yes')",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return f(n - 1) if n else 'yes'\n"
    "print(f(100000))",
    "what is done at the end": "import atexit, threading, time\natexit.register(print, 's')\nclass A:\n"
    "    def __del__(self): print(END, end='')\nEND = ''\na = A()\na.a = a\n"
    "threading.Thread(target=lambda: time.sleep(0.05) or print('e', end='')).start()\nprint('y', end='')",
    "an exit with True": "import sys\nprint('yes')\nsys.exit(False)",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_a_program_finds_what_it_would_find_without_a_sandbox(name: str) -> None:
    assert verdict(ORDINARY[name], streams(("hello", "yes")), memory=256, seconds=60).passed


def test_a_candidate_has_a_file_and_its_functions_have_sources() -> None:
    program = "import inspect\ndef f():  # one\n    return inspect.getsource(f), open(__file__).read()[:6]"
    source = "def f():  # one\n    return inspect.getsource(f), open(__file__).read()[:6]\n"
    assert verdict(program, calls("f", ((), (source, "import")))).passed
    assert verdict("def f(): return 1", checks("assert 'open' in open(__file__).read()", "f")).passed


def test_tests_call_the_candidate_from_threads() -> None:
    code = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(square, range(100))) == [n * n for n in range(100)]
            assert isinstance(pool.submit(square, 'x').exception(), TypeError)
    """
    assert verdict("def square(n): return n * n", checks(code, "square"), seconds=60).passed
    wrong = verdict("def square(n): return n * n if n < 77 else 0", checks(code, "square"), seconds=60)
    assert outcome(wrong) == ("failed", None)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys\nsys.exit('no')", "exit status 1: no"),
        ("import sys\nsys.excepthook = lambda *_: sys.stderr.write('mine')\n1 / 0", "exit status 1: mine"),
        ("raise KeyError('x')", "exit status 1: KeyError: 'x'"),
        ("import sys\nsys.exit(-1)", "exit status 255"),
        ("import os\nos._exit(130)", "exit status 130"),
    ],
)
def test_an_exit_is_told_as_the_interpreter_tells_it(program: str, expected: str) -> None:
    assert verdict(program, streams(("", "x"))).detail == expected
