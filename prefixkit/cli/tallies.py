"""Counts over a run folder's samples, problem by problem, and the different programs among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from prefixkit.cli.problem_texts import text_of_prompt, text_of_tests
from prefixkit.evaluation.campaign.folder import RunFolder
from prefixkit.evaluation.campaign.verdicts import Verdicts
from prefixkit.evaluation.report import OUTCOMES, Candidate, Draw, Problem

_TEXT = 20_000  # characters of a program that are kept
_ROOM = 200_000_000  # characters of programs that are kept of a folder; each problem has an equal part of them


@dataclass
class _Program:
    """A program that is kept."""

    text: str
    outcome: str
    detail: str
    draws: list[Draw] = field(default_factory=list)


@dataclass
class Tally:
    """Counts over a problem's samples.

    Attributes:
        counts: Samples by outcome.
        seen: The digests of all programs.
        kept: Programs by digest, outcome and detail; the first of each outcome, and others while ``room`` lasts.
        room: How many characters of further programs may be kept.
        tokens: The number of tokens of all samples.
        first_solved: The index of the first sample that passed.
        prompt, tests: Those of the problem, as text.
    """

    room: int
    counts: Counter[str] = field(default_factory=Counter)
    seen: set[bytes] = field(default_factory=set)
    kept: dict[tuple[bytes, str, str], _Program] = field(default_factory=dict)
    tokens: int = 0
    first_solved: int | None = None
    prompt: str = ""
    tests: str = ""

    def add(self, text: str, outcome: str, detail: str, draw: Draw) -> None:
        """Count a sample."""
        digest = blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).digest()
        known = self.kept.get((digest, outcome, detail))
        if known is None and (self.room > 0 or not self.counts[outcome]):
            known = self.kept[digest, outcome, detail] = _Program(text[:_TEXT], outcome, detail)
            self.room -= len(known.text)
        if known is not None:
            known.draws.append(draw)
        self.seen.add(digest)
        self.counts[outcome] += 1
        self.tokens += draw.tokens
        if outcome == "passed" and (self.first_solved is None or draw.index < self.first_solved):
            self.first_solved = draw.index


def tally(folder: RunFolder, first: RunFolder, group: int) -> list[Tally]:
    """Tally the samples of a folder; the tallies are in the order of the first folder's problems.

    Args:
        group: The number of the folder's group.
    """
    verdicts = Verdicts(folder)
    tallies = [Tally(_ROOM // len(first.places)) for _ in first.places]
    for asked in verdicts.asked:
        one = tallies[first.places[asked.problem.id]]
        one.prompt = text_of_prompt(asked.problem, folder.manifest.chat)
        one.tests = text_of_tests(asked.problem.tests, asked.problem.head)
    for record in folder.samples():
        text, _, verdict = verdicts.of(folder.places[record["id"]], record["text"])
        outcome, detail = ("unjudged", "") if verdict is None else (verdict.outcome, verdict.detail)
        draw = Draw(record["index"], len(record["tokens"]), group)
        tallies[first.places[record["id"]]].add(text, outcome, detail, draw)
    return tallies


def problem_of(id: str | int, tallies: Sequence[Tally]) -> Problem:
    """The results of a problem's samples, of all folders together."""
    counts: Counter[str] = sum((one.counts for one in tallies), Counter())
    samples = counts.total()
    solved = [one.first_solved for one in tallies if one.first_solved is not None]
    return Problem(
        str(id),
        counts,
        distinct=len(set().union(*(one.seen for one in tallies))) if samples else None,
        mean_tokens=sum(one.tokens for one in tallies) / samples if samples else None,
        first_solved=min(solved, default=None),
        prompt=tallies[0].prompt,
        tests=tallies[0].tests,
        candidates=_candidates(tallies),
    )


def _candidates(tallies: Sequence[Tally]) -> tuple[Candidate, ...]:
    """The programs of all folders, ordered by outcome, and within an outcome those sampled most often first."""
    together: dict[tuple[bytes, str, str], _Program] = {}
    for one in tallies:
        for key, program in one.kept.items():
            here = together.setdefault(key, _Program(program.text, program.outcome, program.detail))
            here.draws.extend(program.draws)
    order = list(OUTCOMES)
    programs = sorted(
        together.values(), key=lambda one: (order.index(one.outcome), -len(one.draws), one.draws[0].index)
    )
    return tuple(
        Candidate(
            one.text, one.outcome, one.detail, tuple(sorted(one.draws, key=lambda draw: (draw.group, draw.index)))
        )
        for one in programs
    )
