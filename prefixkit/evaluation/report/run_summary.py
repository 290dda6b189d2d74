"""The facts about a run from which its report is made; the caller fills them in.

Texts may hold anything: candidates come from a model, ids from a file.  The page and the terminal escape them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# The outcomes of a sample, and the report's words for them.
OUTCOMES: Mapping[str, str] = {
    "passed": "passed every test",
    "failed": "gave a wrong result",
    "error": "raised an exception, or exited with a status other than 0",
    "timeout": "ran longer than the time limit",
    "memory": "used more memory than the limit",
    "output": "wrote more output than the limit",
    "crashed": "ended by a signal",
    "invalid": "does not parse or compile, or lacks the function asked for",
    "unjudged": "has no verdict yet, or its problem has no tests",
}
MOST_LEVELS = 64  # levels of a tree's picture


@dataclass(frozen=True, slots=True)
class Draw:
    """A sample, by its place in the run.

    Attributes:
        index: The sample's index among the problem's samples, from 0.
        tokens: Its length.
        group: The number of its group in ``Facts.groups``; 0 if there are no groups.
    """

    index: int
    tokens: int
    group: int = 0


@dataclass(frozen=True)
class Candidate:
    """One program, and the samples that gave it.

    Attributes:
        text: The program.
        outcome: One of ``OUTCOMES``.
        detail: A line with more about the verdict.
        draws: At least one sample.
    """

    text: str
    outcome: str
    detail: str = ""
    draws: tuple[Draw, ...] = (Draw(0, 0),)

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"an outcome is one of {', '.join(OUTCOMES)}, not {self.outcome!r}")


@dataclass(frozen=True)
class Problem:
    """A problem and the results of its samples.

    Attributes:
        id: Names it.
        counts: Samples by outcome (``OUTCOMES``); outcomes without samples may be left out.
        distinct: The number of different programs among the samples; None if they were not counted.
        mean_tokens: The mean length of a sample; None if unknown.
        first_solved: The index of the first sample that passed, from 0; None if none did.
        prompt: The model's prompt, as text.
        tests: The tests that judge its programs, as text.
        candidates: Its different programs: all of them, or as many as the caller has kept.
    """

    id: str
    counts: Mapping[str, int]
    distinct: int | None = None
    mean_tokens: float | None = None
    first_solved: int | None = None
    prompt: str = ""
    tests: str = ""
    candidates: tuple[Candidate, ...] = ()

    def __post_init__(self) -> None:
        for outcome, count in self.counts.items():
            if outcome not in OUTCOMES or count < 0:
                raise ValueError(f"problem {self.id!r}: {count} samples of the outcome {outcome!r}")

    @property
    def samples(self) -> int:
        """All samples, judged or not."""
        return sum(self.counts.values())

    @property
    def judged(self) -> int:
        """The number of samples that have a verdict: n of pass@k."""
        return self.samples - self.counts.get("unjudged", 0)

    @property
    def passed(self) -> int:
        """The number of samples that passed: c of pass@k."""
        return self.counts.get("passed", 0)

    @property
    def rate(self) -> float | None:
        """The share of judged samples that passed; None if none was judged."""
        return self.passed / self.judged if self.judged else None


@dataclass(frozen=True)
class Group:
    """Samples that were drawn alike, as at one temperature; each group has a curve of its own.

    Attributes:
        label: The group's label, as "T=0.6".
        counts: ``(n, c)`` of each problem: judged samples, and those that passed.
    """

    label: str
    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SavedRow:
    """A line of the savings, as text: the quantity, prefixkit's number, a plain batch's, and their ratio."""

    what: str
    ours: str
    plain: str
    ratio: str


@dataclass(frozen=True)
class Saved:
    """What sharing saved relative to a plain batch, which computes and stores every sequence separately.

    Attributes:
        rows: The rows of a table, each of which names its unit.
        tokens: Tokens that were not computed; None if unknown.
        kv_bytes: Bytes of KV by which the peak was lower; None if unknown.
        seconds: Estimated wall time that was saved; None if nothing was measured.
    """

    rows: tuple[SavedRow, ...] = ()
    tokens: int | None = None
    kv_bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Progress:
    """A moment of the run.

    Attributes:
        seconds: Wall time since the run first started, stops included.
        samples: Samples finished until then, since the first start.
        tokens: Tokens sampled until then, since the first start.
    """

    seconds: float
    samples: int
    tokens: int


@dataclass(frozen=True)
class Branch:
    """A node of a prefix tree: tokens that are stored once.

    Attributes:
        tokens: The node's own length.
        shared_by: The number of sequences that have these tokens.
        text: The tokens' text, or its beginning.
        children: The nodes below it; children that are left out leave a gap in the picture.
    """

    tokens: int
    shared_by: int
    text: str = ""
    children: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A prefix tree to draw.

    Attributes:
        title: The picture's title.
        roots: Nodes without a parent; at most ``MOST_LEVELS`` levels.
    """

    title: str
    roots: tuple[Branch, ...]

    def __post_init__(self) -> None:
        level = list(self.roots)
        for _ in range(MOST_LEVELS):
            level = [child for branch in level for child in branch.children]
        if level:
            raise ValueError(f"a picture has at most {MOST_LEVELS} levels; leave out what is deeper")


@dataclass(frozen=True)
class Facts:
    """The facts about a run.

    Attributes:
        title: Names the run.
        model: The model's name.
        when: When it ran, as text; "" if the report should not say it.
        parameters: Sampling parameters and other settings, name to text.
        versions: Versions of the software, and the device, name to text.
        commands: Command lines that repeat the run.
        problems: The problems, in the data set's order.
        groups: If samples were drawn in several ways, the counts of each way; otherwise none: all are one group.
        new_tokens: Tokens sampled.
        seconds: Wall time of sampling, without the time between runs; 0 if unknown.
        saved: What sharing saved relative to a plain batch.
        progress: One sequence of moments for each time the run was started, in order; between them it was stopped.
        pictures: Prefix trees to draw.
    """

    title: str
    model: str = ""
    when: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    groups: tuple[Group, ...] = ()
    new_tokens: int = 0
    seconds: float = 0.0
    saved: Saved = Saved()
    progress: tuple[tuple[Progress, ...], ...] = ()
    pictures: tuple[Picture, ...] = ()

    @property
    def samples(self) -> int:
        """The number of samples of all problems, judged or not."""
        return sum(problem.samples for problem in self.problems)

    @property
    def counts(self) -> dict[str, int]:
        """Samples of all problems by outcome, in the order of ``OUTCOMES``."""
        return {name: sum(problem.counts.get(name, 0) for problem in self.problems) for name in OUTCOMES}

    @property
    def judged_problems(self) -> int:
        """The number of problems with at least one verdict."""
        return sum(problem.judged > 0 for problem in self.problems)

    @property
    def solved(self) -> int:
        """The number of problems of which at least one sample passed."""
        return sum(problem.passed > 0 for problem in self.problems)

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of sampling; None if the time is unknown."""
        return self.new_tokens / self.seconds if self.seconds > 0 else None

    def by_hardness(self) -> list[Problem]:
        """The problems, hardest first, as :func:`hardness` orders them."""
        return sorted(self.problems, key=hardness)


def hardness(problem: Problem) -> tuple[bool, float, float]:
    """A sort key for problems: lower rates first, then later first solutions; problems without verdicts last."""
    first = math.inf if problem.first_solved is None else problem.first_solved
    return problem.rate is None, problem.rate or 0.0, -first
