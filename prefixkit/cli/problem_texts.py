"""A problem's prompt and its tests as the report shows them: one text each."""

from __future__ import annotations

from collections.abc import Iterable

from prefixkit.evaluation.tasks.problem import Calls, Checks, Oracle, Problem, Tests

_LONGEST = 20_000  # characters of the tests that are shown


def text_of_prompt(problem: Problem, chat: bool) -> str:
    """The prompt: for a chat its messages, each below its role, else the text that the model was given."""
    if not chat:
        return problem.text
    return "\n".join(f"[{one['role']}]\n{one['content'].rstrip()}\n" for one in problem.messages)


def text_of_tests(tests: Tests | None, head: str = "") -> str:
    """The tests of a problem as a person would write them; cases beyond 20,000 characters are only counted; "" for a
    problem without tests.

    Args:
        tests: The problem's tests.
        head: The head of the function that the prompt asks for; a setup that contains nothing else is left out.
    """
    if tests is None:
        return ""
    try:
        return _text(tests, head)
    except (RecursionError, ValueError):  # values nested too deeply, or an integer with too many digits
        return "The tests cannot be written as text."


def _text(tests: Tests, head: str) -> str:
    if isinstance(tests, Checks):
        setup = "" if tests.setup.strip() == head.strip() else tests.setup
        return "\n".join(part.strip("\n") for part in (setup, tests.code) if part.strip())
    if isinstance(tests, Calls):
        within = f"  # within {tests.tolerance:g}" if tests.tolerance else ""
        return _cases(f"{_call(tests.name, given)} == {expected!r}{within}" for given, expected in tests.cases)
    if isinstance(tests, Oracle):
        calls = _cases(_call(tests.name, given) for given in tests.inputs)
        return f"# Each call must return what this solution returns.\n{tests.solution.strip()}\n\n{calls}"
    how = f"checked by a program:\n{tests.checker.strip()}" if tests.checker else f"compared as {tests.compare}."
    return f"Output is {how}\n\n" + _cases(_stream(given, expected) for given, expected in tests.cases)


def _call(name: str, arguments: Iterable[object]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _stream(given: str, expected: str) -> str:
    return f"input:\n{given.rstrip()}\noutput:\n{expected.rstrip()}\n"


def _cases(cases: Iterable[str]) -> str:
    """The first cases, as many as fit, and the number of the others."""
    shown, room, left = list[str](), _LONGEST, 0
    for case in cases:
        if room > 0:
            shown.append(case)
            room -= len(case) + 1
        else:
            left += 1
    return "\n".join([*shown, *([f"… and {left:,} more"] if left else [])])
