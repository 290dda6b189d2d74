"""Prompts, tests and programs as the page carries them: whole, told apart from what they share, and within bounds."""

import base64
import json
import random
import time
import zlib
from collections import Counter

from prefixkit.evaluation.report import OUTCOMES, Candidate, Draw, Problem
from prefixkit.evaluation.report.payloads import beginning_of, payload_of_beginning, payloads
from prefixkit.evaluation.report.shown import marked
from tests.evaluation.report.runs import HOSTILE


def opened(text):
    """What a page's script makes of a payload."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def problem(name, texts, prompt="", outcome="failed"):
    found = tuple(
        Candidate(text, outcome, "why", (Draw(at, 7, 0), Draw(at + 100, 8, 1))) for at, text in enumerate(texts)
    )
    return Problem(name, {outcome: 2 * len(found)}, prompt=prompt, tests="assert f(1)", candidates=found)


def test_a_payload_has_all_of_a_problem():
    (found,) = payloads([problem("a", ["x = 1\n", "y\r\n"], "Say \u202e.")], "")
    assert found.held == 2
    assert opened(found.text) == {
        "prompt": "Say \x01\\u202e\x02.",
        "tests": "assert f(1)",
        "programs": [
            ["x = 1\n", list(OUTCOMES).index("failed"), "why", [0, 7, 0, 100, 8, 1]],
            ["y\n", list(OUTCOMES).index("failed"), "why", [1, 7, 0, 101, 8, 1]],
        ],
    }


def test_hostile_texts_are_base64_and_come_out_as_they_are_shown():
    (found,) = payloads([problem("a", HOSTILE, HOSTILE[0])], "")
    assert set(found.text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/=\n")
    assert [one[0] for one in opened(found.text)["programs"]] == [marked(text, 20_000) for text in HOSTILE]


def test_what_all_prompts_begin_with_is_kept_once():
    shared = "# One example.\n" * 30
    problems = [problem(name, [], f"{shared}# Solve {name}.\n") for name in "abc"]
    beginning = beginning_of(problems)
    assert beginning == shared
    assert opened(payload_of_beginning(beginning))["prompt"] == shared
    assert [opened(one.text)["prompt"] for one in payloads(problems, beginning)] == [f"# Solve {n}.\n" for n in "abc"]


def test_short_beginnings_and_those_of_one_problem_are_left_where_they_are():
    assert beginning_of([]) == beginning_of([problem("a", [], "line\n" * 99)]) == ""
    assert beginning_of([problem(name, [], f"line\n{name}") for name in "ab"]) == ""
    assert beginning_of([problem("a", [], "x" * 500), problem("b", [], "x" * 600)]) == "", "in the midst of a line"


def test_where_all_do_not_fit_large_problems_keep_programs_of_every_outcome():
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    few = problem("few", ["pass\n"])
    names = ["passed"] * 50 + ["failed"] * 5 + ["error"]
    large = tuple(Candidate(chance.randbytes(500).hex(), name) for name in names)
    room = 20_000
    found = payloads([few, Problem("large", Counter(names), candidates=large)], "", room)
    assert sum(len(one.text) for one in found) <= room
    assert found[0].held == 1 and 3 <= found[1].held < 56
    kept = Counter(list(OUTCOMES)[one[1]] for one in opened(found[1].text)["programs"])
    assert kept.total() == found[1].held and kept.keys() == set(names)
    assert kept["passed"] - kept["failed"] <= 1, "the second of each outcome comes before the third of any"


def test_where_one_program_of_each_outcome_does_not_fit_texts_are_shortened():
    text = random.Random(1).randbytes(9_000).hex()
    (found,) = payloads([problem("a", [text], text)], "", 3_000)
    assert len(found.text) <= 3_000 and found.held == 1
    assert "characters…" in opened(found.text)["programs"][0][0]
