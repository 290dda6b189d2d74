"""Prompts, tests and programs in the page: one compressed text for each problem, which the script opens when needed.

A payload is JSON in zlib's format, in base64, which a browser opens with ``DecompressionStream("deflate")``.  Hidden
characters of its texts are escaped first (:func:`~prefixkit.evaluation.report.shown.marked`); the script makes text
nodes of the texts.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixkit.evaluation.report.run_summary import OUTCOMES, Candidate, Problem
from prefixkit.evaluation.report.shown import marked, visible

ROOM = 14_000_000  # characters of all payloads together
_LONGEST, _SHORTEST = 20_000, 160  # characters of a prompt, tests or a program
_LINE = 4_000  # characters of a line of base64: editors handle longer lines badly
_WORTH = 200  # characters that a common beginning must have to be shown apart
_LEVEL = 6  # of zlib: 9 makes programs 3% smaller, in four times the time


@dataclass(frozen=True)
class Payload:
    """The texts of a problem in the page.

    Attributes:
        text: Base64, in lines.
        held: The number of programs in it.
    """

    text: str
    held: int


def beginning_of(problems: Sequence[Problem]) -> str:
    """The beginning that all prompts share, in whole lines, such as few-shot examples; "" if it is short."""
    if len(problems) < 2:
        return ""
    # All texts share the beginning that the first and the last of the sorted texts share.
    first, last = (find(problem.prompt for problem in problems) for find in (min, max))
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    shared = first[: first.rfind("\n", 0, same) + 1]
    return shared if len(shared) >= _WORTH else ""


def payload_of_beginning(beginning: str) -> str:
    """The payload of the beginning that all prompts share."""
    return _packed({"prompt": marked(beginning, _LONGEST)})


def payloads(problems: Sequence[Problem], beginning: str, room: int = ROOM) -> list[Payload]:
    """A payload for each problem: whole if all fit, else payloads above their share hold fewer programs, some of every
    outcome, and then shorter ones.
    """
    found = [_payload(problem, beginning, len(problem.candidates), _LONGEST) for problem in problems]
    if sum(len(one.text) for one in found) <= room:
        return found
    share = room // len(found)
    pairs = zip(problems, found, strict=True)
    return [one if len(one.text) <= share else _within(share, problem, beginning, one) for problem, one in pairs]


def _within(share: int, problem: Problem, beginning: str, whole: Payload) -> Payload:
    """A payload of at most ``share`` characters, or the shortest possible one."""
    fewest, longest, found = len(problem.counts), _LONGEST, whole
    while len(found.text) > share and (found.held > fewest or longest > _SHORTEST):
        if found.held > fewest:
            found = _payload(problem, beginning, max(fewest, found.held * share // len(found.text)), longest)
        else:
            longest //= 2
            found = _payload(problem, beginning, found.held, longest)
    return found


def _payload(problem: Problem, beginning: str, most: int, longest: int) -> Payload:
    chosen = _chosen(problem.candidates, most)
    text = _packed(
        {
            "prompt": marked(problem.prompt[len(beginning) :], longest),
            "tests": marked(problem.tests, longest),
            "programs": [_program(one, longest) for one in chosen],
        }
    )
    return Payload(text, len(chosen))


def _chosen(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """The ``most`` candidates of a page, in their order: the first of each outcome, then the second, and so on."""
    seen: Counter[str] = Counter()
    ranks = []
    for place, one in enumerate(candidates):
        ranks.append((seen[one.outcome], place))
        seen[one.outcome] += 1
    return [candidates[place] for place in sorted(place for _, place in sorted(ranks)[:most])]


def _program(one: Candidate, longest: int) -> list[Any]:
    """``[text, outcome, detail, [index, tokens, group, index, ...]]``."""
    draws = [number for draw in one.draws for number in (draw.index, draw.tokens, draw.group)]
    return [marked(one.text, longest), list(OUTCOMES).index(one.outcome), visible(one.detail), draws]


def _packed(record: dict[str, Any]) -> str:
    data = zlib.compress(json.dumps(record, separators=(",", ":")).encode(), _LEVEL)
    text = base64.b64encode(data).decode()
    return "\n".join(text[start : start + _LINE] for start in range(0, len(text), _LINE))
