"""Attacks on the verdict: each fools a judge that runs program and tests in one process, and none fools this one."""

from __future__ import annotations

import textwrap

import pytest

from prefixkit.evaluation.judge.wire import framed, write
from tests.evaluation.judge.judging import calls, checks, naive, needs_sandbox, verdict

pytestmark = needs_sandbox()

TESTS = checks(
    """
    def check(candidate):
        assert candidate(2) == 1048583
        assert abs(candidate(3) - 1048609) < 1e-6
        assert all(map(lambda pair: candidate(pair[0]) == pair[1], [(4, 1048613), (5, 1048627)]))
        assert isinstance(candidate(6), int) and len(str(candidate(6))) == 7
    check(f)
    """,
    "f",
)
CALLS = calls("f", ((2,), 1048583), ((3,), 1048609), ((4,), 1048613))

# None of these knows the function that is asked for.
FORGERIES = {
    "exit before the tests": "import sys\ndef f(x): return 0\nsys.exit(0)",
    "exit at once": "import os\ndef f(x): return 0\nos._exit(0)",
    "exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "exit at once in the call": "import os\ndef f(x): os._exit(0)",
    "raise SystemExit as another class": "class E(SystemExit): pass\ndef f(x): raise E(0)",
    "change the exit status on the way out": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "an object that equals everything": """
        class All(int):
            def __eq__(self, other): return True
            def __sub__(self, other): return All()
            def __abs__(self): return All()
            def __lt__(self, other): return True
            def __str__(self): return '1234567'
            __hash__ = None
        def f(x): return All()
    """,
    "an object that equals everything, of no other type": """
        class All:
            __class__ = int
            def __eq__(self, other): return True
            def __sub__(self, other): return self
            def __abs__(self): return self
            def __lt__(self, other): return True
            def __str__(self): return '1234567'
        def f(x): return All()
    """,
    "functions of Python's": """
        import builtins
        builtins.abs = lambda x: 0
        builtins.all = builtins.isinstance = lambda *x: True
        class All(int):
            def __eq__(self, other): return True
        builtins.len = lambda x: All()
        def f(x): return All()
    """,
    "an exception hook that exits well": """
        import os, sys
        sys.excepthook = lambda *a: os._exit(0)
        def f(x): return 0
    """,
    "read the expected value from the caller's code": """
        import sys
        def f(x):
            frame, found = sys._getframe(1), []
            while frame:
                found += [c for c in frame.f_code.co_consts if type(c) is int and c > 10**6]
                found += [n for c in frame.f_code.co_consts if type(c) is tuple for p in c
                          for n in (p if type(p) is tuple else [p]) if type(n) is int and n > 10**6]
                frame = frame.f_back
            known = {2: 1048583, 3: 1048609, 4: 1048613, 5: 1048627, 6: 1048627}
            return known[x] if known[x] in found or found else 0
    """,
    "read the expected value from the heap": """
        import gc, sys, types
        def f(x):
            for thing in gc.get_objects():
                if isinstance(thing, types.FunctionType) and thing.__name__ == 'check':
                    return {2: 1048583, 3: 1048609, 4: 1048613, 5: 1048627, 6: 1048627}[x]
            return 0
    """,
    "a StopIteration that ends the tests' loop": """
        def f(x):
            if x < 4: return {2: 1048583, 3: 1048609}[x]
            if x == 6: return 1048627
            raise StopIteration
    """,
    "a signal that exits well": """
        import os, signal
        signal.signal(signal.SIGALRM, lambda *a: os._exit(0))
        def f(x):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            while True: pass
    """,
    "a thread that exits well": """
        import os, threading, time
        def later():
            time.sleep(0.05)
            os._exit(0)
        threading.Thread(target=later, daemon=True).start()
        def f(x): time.sleep(1)
    """,
    "a trace function that jumps": """
        import sys, os
        def tracing(frame, event, argument):
            if event == 'exception' or event == 'return': os._exit(0)
            return tracing
        def f(x):
            sys.settrace(tracing)
            return (lambda: 0)()
    """,
    "an assertion that is never raised": """
        import os, sys
        sys.unraisablehook = sys.excepthook = lambda *a: os._exit(0)
        def f(x): raise AssertionError
    """,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_fools_a_judge_of_one_process_and_not_this_one(name: str) -> None:
    assert naive(FORGERIES[name], TESTS), "a judge that runs program and tests in one process is not fooled"
    assert not verdict(FORGERIES[name], TESTS, seconds=3).passed
    assert not verdict(FORGERIES[name], CALLS, seconds=3).passed


def message(*values: object) -> str:
    return repr(framed(write(list(values))))


PASSED = repr(framed(b"." + write(["passed", ""])) + framed(write(["passed", ""])))
EVERYWHERE = "for fd in range(64):\n    try: os.write(fd, %s)\n    except OSError: pass\n"

# These know how the judge talks with its programs, and mean to mislead it.
ON_THE_CHANNEL = {
    "say that it passed": f"import os\n{EVERYWHERE % PASSED}\ndef f(x): return 0",
    "say so in the call": "import os\ndef f(x):\n"
    + "".join(f"    {line}\n" for line in (EVERYWHERE % PASSED).splitlines())
    + "    return 0",
    "say so, then exit well": f"import os\n{EVERYWHERE % PASSED}\nos._exit(0)",
    "answer before it is asked": f"import os\n{EVERYWHERE % message('loaded', {'f': ('function',)})}\n"
    f"{EVERYWHERE % message('returned', 0, [])}\ndef f(x): return 0",
    "have names that the tests use": "import os\n"
    + EVERYWHERE
    % message("loaded", {"f": ("value", 1), "abs": ("function",), "all": ("function",), "isinstance": ("function",)})
    + "\ndef f(x): return 0",
    "be no function": f"import os\n{EVERYWHERE % message('loaded', {'f': ('value', 1)})}",
    "fail with a text that is a huge integer": f"import os\n{EVERYWHERE % 'HUGE'}",
    "lack a name that is a huge integer": f"import os\n{EVERYWHERE % 'NAMELESS'}",
    "have names that are no pairs": f"import os\n{EVERYWHERE % message('loaded', {1, 2})}",
    "say nonsense": "import os\n" + EVERYWHERE % "os.urandom(100)" + "\ndef f(x): return 0",
    "announce a message without end": "import os\n" + EVERYWHERE % r"b'\xff\xff\xff\xff'" + "\ndef f(x): return 0",
    "announce many values": "import os\n" + EVERYWHERE % repr(b"\0\0\0\x05l\xff\xff\xff\xff") + "\ndef f(x): return 0",
    "refer to a value of the judge's": f"import os\n{EVERYWHERE % repr(framed(b'h' + bytes(3) + b'1' + bytes(1)))}",
    "change arguments that there are not": "import os\ndef f(x):\n"
    + "".join(f"    {line}\n" for line in (EVERYWHERE % message("returned", 0, [(7, [1]), ("y", 2)])).splitlines()),
    "raise what is no exception": "import os\ndef f(x):\n"
    + "".join(f"    {line}\n" for line in (EVERYWHERE % message("raised", "exit", [0], "x", [])).splitlines()),
    "leave the tests by SystemExit": "import os\ndef f(x):\n"
    + "".join(f"    {line}\n" for line in (EVERYWHERE % message("raised", "SystemExit", [0], "x", [])).splitlines()),
    "take the place of the answering program": """
        import sys
        answering = sys.modules['prefixkit.evaluation.judge.guest.answering']
        answering.Answering.answer = lambda self, message: self._say('passed', '')
        def f(x): return 0
    """,
    "answer in the name of the tests": """
        import sys
        wire = sys.modules['prefixkit.evaluation.judge.wire']
        start = sys.modules['prefixkit.evaluation.judge.guest.start']
        send = start.Channel.send
        start.Channel.send = lambda self, content: send(self, b'.' + wire.write(['passed', '']))
        def f(x): return 0
    """,
    "find the tests in files": """
        wanted = int(str(10485) + str(83))
        def f(x):
            for name in ('guest', 'expected', 'output', 'tests', 'cmdline', 'environ', 'mem'):
                for folder in ('/judge/', '/tmp/', '/proc/self/', '/proc/1/', '/'):
                    try: content = open(folder + name, 'rb').read()
                    except OSError: continue
                    if str(wanted).encode() in content or wanted.to_bytes(4, 'little') in content: return wanted
    """,
    "find the tests in memory": """
        import gc
        wanted = int(str(10485) + str(83))
        def f(x):
            found = [o for o in gc.get_objects() if type(o) in (tuple, list) and wanted in o]
            return wanted if found else 0
    """,
    "flood the channel": """
        import os, threading
        def flood():
            while True:
                for fd in range(3, 10):
                    try: os.write(fd, bytes(4096))
                    except OSError: pass
        threading.Thread(target=flood, daemon=True).start()
        def f(x): return 0
    """,
    "close the channel": "import os\nos.closerange(0, 256)\ndef f(x): return 0",
    "close the channel in the call": "import os\ndef f(x): os.closerange(0, 256)",
    "hashes that collide": """
        m = 2**61 - 1
        def f(x): return {k * m: 0 for k in range(2000)}
    """,
}


HUGE = framed(write(["raised", 10**5000, 10**5000, 10**5000, []]))
NAMELESS = framed(write(["loaded", {10**5000: ("missing",)}]))


@pytest.mark.parametrize("name", ON_THE_CHANNEL)
def test_a_candidate_can_only_choose_its_own_answers(name: str) -> None:
    program = f"HUGE, NAMELESS = {HUGE!r}, {NAMELESS!r}\n" + textwrap.dedent(ON_THE_CHANNEL[name])
    for tests in (TESTS, CALLS):
        found = verdict(program, tests, seconds=1)
        assert not found.passed
        assert "1048583" not in found.detail


RESULTS = {
    "a huge integer": ("return 10 ** 200000", "failed"),
    "an integer beyond a message": ("return 1 << (8 * 20 << 20)", "output"),
    "a range of huge integers": ("return range(10 ** 5000)", "failed"),
    "keys that are huge integers": ("return {10 ** 5000: 10 ** 5000}", "failed"),
    "a huge string": ("return 'x' * (20 << 20)", "output"),
    "many values": ("return [[i] for i in range(6 * 10**5)]", "output"),
    "a list within itself": ("a = []; a.append(a); return a", "output"),
    "lists nested deeply": ("a = []\n    for i in range(10**5): a = [a]\n    return a", "output"),
    "values shared exponentially": ("a = []\n    for i in range(100): a = [a, a]\n    return a", "output"),
    "a generator without end": ("import itertools; return itertools.count()", "failed"),
    "recursion without end": ("return f(x)", "error"),
    "an exception whose text raises": (
        "class E(Exception):\n        def __str__(self): raise SystemExit(0)\n    raise E",
        "error",
    ),
    "an exception with a huge text": ("raise ValueError('x' * 10**7)", "error"),
    "memory": ("return [0] * (10**9)", "memory"),
    "a class that lies about its name": (
        "class M(type):\n        __name__ = property(lambda s: 1 / 0)\n    return M('C', (), {})()",
        "error",
    ),
    "nothing": ("pass", "failed"),
    "control characters": ("return '\\x1b[2J\\n\\0\\u202e'", "failed"),
    "a lone surrogate": ("return '\\ud800'", "failed"),
    "a segmentation fault": ("import ctypes; return ctypes.string_at(0)", "crashed"),
    "a signal to itself": ("import signal; signal.raise_signal(9)", "crashed"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_strange_results_have_the_right_outcome(name: str) -> None:
    body, outcome = RESULTS[name]
    found = verdict(f"def f(x):\n    {body}\n", CALLS, seconds=60)
    assert found.outcome == outcome, found
    assert found.case == 0
    assert len(found.detail) <= 300 and found.detail.isprintable()
    assert not verdict(f"def f(x):\n    {body}\n", TESTS, seconds=60).passed
