"""Runs as a report gets them: made up, with a seed, and hostile texts."""

import random

from prefixkit.evaluation.report import (
    Branch,
    Candidate,
    Draw,
    Facts,
    Group,
    Picture,
    Problem,
    Progress,
    Saved,
    SavedRow,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "</style></script><img src=x onerror=alert(2)>",
    "\"'`><svg onload=alert(3)>",
    "a\x00b\x1b[2J\x7f\x85c",
    "before \u202e reversed \u2066 isolated \u2069 after",
    "half of a pair: \ud800",
    "{{ 7 * 7 }}{% raw %}",
    "x" * 100_000,
    "--></textarea></title><!--",
    "&lt;b&gt; &#0; \ufeff\u200b\u2028",
    "javascript:alert(4)",
)
SHOWN = "# An example.\n" * 30  # what all prompts begin with
FAILURES = ("failed", "error", "timeout", "memory", "output", "crashed", "invalid")


def small(**more):
    """Two problems of four samples, with one solved."""
    problems = (
        Problem(
            "a/0",
            {"passed": 1, "failed": 3},
            4,
            12.5,
            2,
            candidates=(Candidate("return 1", "passed", "", (Draw(2, 3),)),),
        ),
        Problem("a/1", {"error": 3, "unjudged": 1}, 3, 20.0),
    )
    return Facts(**{"title": "two problems", "problems": problems} | more)


def campaign(problems=164, samples=200, *, hostile=False):
    """A run of every kind of fact."""
    chance = random.Random(1)
    found = tuple(_problem(number, samples, chance, hostile) for number in range(problems))
    half = samples // 2
    groups = tuple(
        Group(label, tuple((half, min(half, round(half * (one.rate or 0) ** power))) for one in found))
        for label, power in (("T=0.2", 1.3), ("T=0.8", 1.0), ("T=1.2", 0.9))
    )
    return Facts(
        title="HumanEval, sampled" if not hostile else HOSTILE[0],
        model="SmolLM2-135M-Instruct" if not hostile else HOSTILE[1],
        when="a day",
        parameters={"temperature": "0.8"} | ({text[:50]: text for text in HOSTILE} if hostile else {}),
        versions={"torch": "2.13.0"},
        commands=("prefixkit campaign --model demo", *(HOSTILE if hostile else ())),
        problems=found,
        groups=groups + (tuple(Group(text, groups[0].counts) for text in HOSTILE) if hostile else ()),
        new_tokens=5_000_000,
        seconds=7200.0,
        saved=Saved((SavedRow("tokens computed", "1,000", "5,000", "5.0x"),), 4_000, 3 << 30, 600.0),
        progress=_progress(),
        pictures=(Picture("a prompt", (_tree(samples, HOSTILE if hostile else ("words",)),)),),
    )


def _problem(number, samples, chance, hostile):
    easy = chance.betavariate(0.45, 0.7) if number % 6 else 0.0
    passed = sum(chance.random() < easy for _ in range(samples))
    counts = {"passed": passed} | dict.fromkeys(FAILURES, 0)
    for _ in range(samples - passed):
        counts[chance.choice(FAILURES)] += 1
    body = "".join(f"    value_{line} = sorted(numbers)[{line}]\n" for line in range(chance.randint(3, 20)))
    texts = [f"def solve_{number}(numbers):\n{body}    return value_{last}\n" for last in range(3)]
    texts += [HOSTILE[number % len(HOSTILE)]] * hostile
    outcomes = (*(name for name in counts if counts[name]), "failed", "failed")
    candidates = [
        Candidate(text, outcome, text[:400] if hostile else "gave 4, not 5", (Draw(at, 30), Draw(at + 20, 31, 1)))
        for at, (text, outcome) in enumerate(zip(texts, outcomes, strict=False))
    ]
    name = HOSTILE[number % len(HOSTILE)] if hostile and number < 2 * len(HOSTILE) else f"HumanEval/{number}"
    solved = chance.randrange(samples) if passed else None
    text = HOSTILE[(number + 1) % len(HOSTILE)] if hostile else f"Solve {number}.\n"
    return Problem(name, counts, 50, 120.5, solved, f"{SHOWN}{text}", f"assert {text}", tuple(candidates))


def _progress():
    starts, second, tokens = [], 0.0, 0
    for _ in range(3):
        moments = []
        for _ in range(50):
            moments.append(Progress(second, tokens // 150, tokens))
            second, tokens = second + 30, tokens + 40_000
        starts.append(tuple(moments))
        second += 900
    return tuple(starts)


def _tree(samples, texts):
    leaves = [Branch(20 + number, 1, texts[number % len(texts)]) for number in range(samples)]
    return Branch(
        300, samples, texts[0], (Branch(50, samples // 2, "half", tuple(leaves[: samples // 2])), *leaves[-3:])
    )
