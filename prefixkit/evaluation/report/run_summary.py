"""What is known of a run: what a report is made of, filled by the caller.

Texts may hold anything: candidates come from a model, ids from a file.  The page and the terminal make them harmless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# What a sample can come to, and what the report says of it.
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
MOST_LEVELS = 64  # of a tree's picture


@dataclass(frozen=True, slots=True)
class Draw:
    """A sample, by its place in the run.

    Attributes:
        index: Which sample of the problem, from 0.
        tokens: Its length.
        group: Of ``Facts.groups``, the number of the one that it belongs to; 0 where there are none.
    """

    index: int
    tokens: int
    group: int = 0


@dataclass(frozen=True)
class Candidate:
    """One program, and the samples that are it.

    Attributes:
        text: The program.
        outcome: One of ``OUTCOMES``.
        detail: A line that says more of the verdict.
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
    """A problem and what its samples came to.

    Attributes:
        id: Names it.
        counts: Samples by outcome (``OUTCOMES``); outcomes without samples may be left out.
        distinct: Different programs among the samples; None where they were not counted.
        mean_tokens: Of a sample; None where unknown.
        first_solved: The index of the first sample that passed, from 0; None where none did.
        prompt: What the model was given, as text.
        tests: What judges its programs, as text.
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
        """Samples that have a verdict: n of pass@k."""
        return self.samples - self.counts.get("unjudged", 0)

    @property
    def passed(self) -> int:
        """Samples that passed: c of pass@k."""
        return self.counts.get("passed", 0)

    @property
    def rate(self) -> float | None:
        """The share of judged samples that passed; None where none was judged."""
        return self.passed / self.judged if self.judged else None


@dataclass(frozen=True)
class Group:
    """Samples that were drawn alike, as at one temperature; each group has a curve of its own.

    Attributes:
        label: As "T=0.6".
        counts: ``(n, c)`` of each problem: judged samples, and those that passed.
    """

    label: str
    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SavedRow:
    """One line of what was saved, as text: ``what``, the numbers of prefixkit and of a plain batch, and their ratio."""

    what: str
    ours: str
    plain: str
    ratio: str


@dataclass(frozen=True)
class Saved:
    """What sharing saved against a plain batch, which computes and keeps every sequence for itself.

    Attributes:
        rows: A table, in the units that they name.
        tokens: Tokens that were not computed; None where unknown.
        kv_bytes: Bytes of KV that were not held at the fullest moment; None where unknown.
        seconds: Estimated wall time that was saved; None where nothing was measured.
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
        samples: Finished until then, since the first start.
        tokens: Sampled until then, since the first start.
    """

    seconds: float
    samples: int
    tokens: int


@dataclass(frozen=True)
class Branch:
    """A node of a prefix tree: tokens that are stored once.

    Attributes:
        tokens: The node's own length.
        shared_by: Sequences that have these tokens.
        text: The tokens' text, or its beginning.
        children: What follows; those left out leave a gap in the picture.
    """

    tokens: int
    shared_by: int
    text: str = ""
    children: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A prefix tree to draw.

    Attributes:
        title: What it is of.
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
    """What is known of a run.

    Attributes:
        title: Names the run.
        model: The model's name.
        when: When it ran, as text; "" where that should not be said.
        parameters: Sampling parameters and other settings, name to text.
        versions: Of the software and the device, name to text.
        commands: Command lines that make the run again.
        problems: In the data set's order.
        groups: Where samples were drawn in several ways, each way's counts; else none, and all samples are one group.
        new_tokens: Tokens sampled.
        seconds: Wall time of sampling, stops left out; 0 where unknown.
        saved: Against a plain batch.
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
        """Of all problems, judged or not."""
        return sum(problem.samples for problem in self.problems)

    @property
    def counts(self) -> dict[str, int]:
        """Samples of all problems by outcome, in the order of ``OUTCOMES``."""
        return {name: sum(problem.counts.get(name, 0) for problem in self.problems) for name in OUTCOMES}

    @property
    def judged_problems(self) -> int:
        """Problems with at least one verdict."""
        return sum(problem.judged > 0 for problem in self.problems)

    @property
    def solved(self) -> int:
        """Problems of which at least one sample passed."""
        return sum(problem.passed > 0 for problem in self.problems)

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of sampling; None where no time is known."""
        return self.new_tokens / self.seconds if self.seconds > 0 else None

    def by_hardness(self) -> list[Problem]:
        """The problems, hardest first, as :func:`hardness` orders them."""
        return sorted(self.problems, key=hardness)


def hardness(problem: Problem) -> tuple[bool, float, float]:
    """Sorts problems: the lower rate first, then the later first solution; those without verdicts last."""
    first = math.inf if problem.first_solved is None else problem.first_solved
    return problem.rate is None, problem.rate or 0.0, -first
