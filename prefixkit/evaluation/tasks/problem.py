"""A problem: the question to the model, and how its candidate programs are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict
from unicodedata import normalize

from prefixkit.evaluation.tasks.typed import made

Language = Literal["python", "cpp"]
LANGUAGES = ("python", "cpp")
Compare = Literal["exact", "tokens", "numbers"]
COMPARISONS = ("exact", "tokens", "numbers")


class Message(TypedDict):
    """One message of a conversation; a last message of role ``assistant`` is a begun answer, which samples continue."""

    role: str
    content: str


@dataclass(frozen=True)
class Limits:
    """The limits of one run of a candidate.

    Attributes:
        seconds: Limit on wall time, and on CPU time; a day at most.
        memory: MiB; 1 TiB at most.
        output: KiB on standard output and standard error together; 1 GiB at most.

    Raises:
        ValueError: a limit is of another type, 0 or below, or above its maximum.
    """

    seconds: float = 10.0
    memory: int = 1024
    output: int = 4096

    def __post_init__(self) -> None:
        for name, kind, most in (("seconds", int | float, 86_400), ("memory", int, 1 << 20), ("output", int, 1 << 20)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= most:
                what = "an integer" if kind is int else "a number"
                raise ValueError(f"limits: {name} must be {what} above 0 and at most {most:,}, got {repr(value)[:40]}")


def _as_python_reads(name: str) -> str:
    """A name as Python has it in a module: there are several spellings of some letters."""
    return normalize("NFKC", name)


@dataclass(frozen=True)
class Checks:
    """Python code that raises unless the candidate's functions are right, as in HumanEval and MBPP.

    Attributes:
        code: The assertions.
        names: The candidate's functions, and other names of its module, that ``code`` uses.
        setup: Python code that runs before ``code``: imports and helpers.
    """

    code: str
    names: tuple[str, ...]
    setup: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(map(_as_python_reads, self.names)))


@dataclass(frozen=True)
class Calls:
    """Calls of a function, and their results, as JSON values, as in EvalPlus, APPS and LiveCodeBench.

    Attributes:
        name: The function, or ``Class.method`` of a class that is instantiated without arguments.
        cases: ``(arguments, expected)`` of each call.
        tolerance: Absolute and relative, between floats; 0: they must be equal.
    """

    name: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _as_python_reads(self.name))


@dataclass(frozen=True)
class Streams:
    """Texts that a program gets on standard input, and texts that it must write to standard output.

    Attributes:
        cases: ``(input, output)`` of each run.
        compare: ``exact``: byte by byte; ``tokens``: whatever the white space; ``numbers``: as tokens, but numbers may
            differ by ``tolerance``, absolute or relative.
        tolerance: See ``compare``.
        checker: A Python program that decides instead of ``compare``, given the paths of input, expected output and
            output: it accepts by exit status 0.
    """

    cases: tuple[tuple[str, str], ...]
    compare: Compare = "tokens"
    tolerance: float = 0.0
    checker: str = ""


@dataclass(frozen=True)
class Oracle:
    """Calls of a function that must return what a solution returns, as in EvalPlus: expected values come from a run.

    The judge runs ``solution`` as a module, calls its function ``name`` on each of ``inputs``, and keeps what it
    returns; the candidate's function is then called on inputs of its own, made anew, for a function may change them.

    Attributes:
        name: The function, in the solution and in the candidate.
        solution: A Python program that solves the problem; it is trusted as much as the data set.
        inputs: The arguments of each call, as JSON values.
        tolerance: Absolute, between floats, with a relative tolerance of 1e-7; 0: 1e-6 if a float, or a list of floats,
            is expected, and all other values must be equal.
        adapt: A Python expression of ``arguments``, a list, which gives the true arguments if JSON cannot express them
            (tuples, sets, complex numbers); "": the call gets ``arguments`` themselves.
        accept: A Python expression of ``arguments``, ``expected``, ``found`` and ``tolerance`` that decides instead of
            equality; it can use the names of the solution's module; "": equality decides.
    """

    name: str
    solution: str
    inputs: tuple[tuple[Any, ...], ...]
    tolerance: float = 0.0
    adapt: str = ""
    accept: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _as_python_reads(self.name))


Tests = Checks | Calls | Streams | Oracle
KINDS: dict[str, type[Any]] = {"checks": Checks, "calls": Calls, "streams": Streams, "oracle": Oracle}


@dataclass(frozen=True)
class Example:
    """A question and its answer, to be shown before a question.

    Attributes:
        messages: For a model with a chat template; the last message is the assistant's.
        text: For a model without one, up to where the next text begins.
    """

    messages: tuple[Message, ...]
    text: str


@dataclass(frozen=True)
class Problem:
    """A question to the model, and how its candidates are judged.

    Attributes:
        id: Names the problem in the files of a run.
        where: Its file and line, or its task, for error messages.
        messages: For a model with a chat template.
        text: For a model without one.
        head: The code before the body of a function to complete; a candidate that begins elsewhere, in a code block of
            a chat, may lack its imports.
        name: The function or class that a candidate must define; "" if it is a whole program.
        language: The candidates' language.
        tests: How candidates are judged; None: they are not judged.
        limits: The limits of one run.
        params: The problem's own sampling parameters, checked: fields of ``SamplingParams`` (tasks/problem_params.py).
        chat_stop, text_stop: Strings that end an answer, with a chat template and without one.
        solution: A program that solves it, if the data set has one: for few-shot examples, and to try the tests.
        examples: Examples that are shown before this problem alone.
    """

    id: str | int
    where: str
    messages: tuple[Message, ...]
    text: str
    head: str = ""
    name: str = ""
    language: Language = "python"
    tests: Tests | None = None
    limits: Limits = Limits()
    params: Mapping[str, Any] = field(default_factory=dict)
    chat_stop: tuple[str, ...] = ()
    text_stop: tuple[str, ...] = ()
    solution: str = ""
    examples: tuple[Example, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _as_python_reads(self.name))

    def to_json(self) -> dict[str, Any]:
        """The problem as JSON values, with tuples for lists."""
        record = {**vars(self), "limits": vars(self.limits), "examples": [vars(one) for one in self.examples]}
        if self.tests is not None:
            kind = next(name for name, cls in KINDS.items() if isinstance(self.tests, cls))
            record["tests"] = {"kind": kind, **vars(self.tests)}
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Problem:
        """The problem whose :meth:`to_json` this is.

        Raises:
            ValueError, TypeError, KeyError: a field is unknown, missing or of another type.
        """
        tests = record.get("tests")
        if tests is not None:
            own = dict(tests)
            tests = made(KINDS[own.pop("kind")], own)
        return made(cls, {**record, "tests": tests})
