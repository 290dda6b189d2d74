"""The report's page of a large run: its size, and how fast Chromium shows it, opens a problem and searches.

>>> python -m benchmarks.report_page --out page.json

The run is synthetic: HumanEval's canonical solutions with random edits, as different from one another as a model's
samples, with made-up verdicts.  It is written to a run folder, from which the report is made as by
``prefixkit report``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from prefixkit.cli.problem_texts import text_of_tests
from prefixkit.cli.run_facts import facts_of
from prefixkit.evaluation import report
from prefixkit.evaluation.campaign.folder import Asked, RunFolder, create
from prefixkit.evaluation.campaign.manifest import Manifest, describe_prompts
from prefixkit.evaluation.campaign.shards import ShardWriter
from prefixkit.evaluation.campaign.verdicts import Verdicts
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.report import OUTCOMES, Candidate, Draw, Facts, write_report
from prefixkit.evaluation.tasks.answers import begun
from prefixkit.evaluation.tasks.formats.humaneval import installed, read
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.testing.application.browser import CHROMIUM, Browser

# How often a sample is the canonical solution, and how often a line of another one is changed in each way.
CANONICAL, OTHER_LINE, DROPPED, RENAMED = 0.05, 0.35, 0.1, 0.5


def edited(solution: str, corpus: Sequence[str], chance: random.Random) -> str:
    """A solution's body in which lines are replaced by other lines of the corpus, left out, or have other words."""
    if chance.random() < CANONICAL:
        return solution
    lines = []
    for line in solution.splitlines():
        way = chance.random()
        if way < OTHER_LINE:
            line = chance.choice(corpus)
        elif way < OTHER_LINE + DROPPED:
            continue
        elif way < OTHER_LINE + DROPPED + RENAMED and (words := line.split()):
            for word in set(chance.choices(words, k=2)):
                line = line.replace(word, chance.choice(chance.choice(corpus).split()))
        lines.append(line)
    return "\n".join(lines) + "\n"


def made_up_samples(
    problems: Sequence[Problem], samples: int, chance: random.Random
) -> Iterator[tuple[int, int, str, Verdict]]:
    """``(problem, index, text, verdict)`` of each sample; canonical solutions pass."""
    bodies = [problem.solution.removeprefix(problem.head) for problem in problems]
    corpus = [line for body in bodies for line in body.splitlines() if line.strip()]
    failures = [name for name in OUTCOMES if name not in ("passed", "unjudged")]
    for place, body in enumerate(bodies):
        easy, verdicts = chance.random() ** 2, dict[str, Verdict]()
        for index in range(samples):
            text = "\n" + edited(body, corpus, chance)
            passes = text[1:] == body or chance.random() < easy
            outcome = "passed" if passes else chance.choice(failures)
            detail = "" if passes else f"assert candidate({chance.randrange(100)}) == {chance.randrange(100)}"
            yield place, index, text, verdicts.setdefault(text, Verdict(outcome, detail=detail))


def made_up_facts(samples: int, chance: random.Random) -> Facts:
    """The facts of a synthetic run, without a run folder."""
    problems = [read(record) for record in installed()]
    found: list[dict[tuple[str, Verdict], list[Draw]]] = [{} for _ in problems]
    for place, index, text, verdict in made_up_samples(problems, samples, chance):
        found[place].setdefault((text, verdict), []).append(Draw(index, len(text) // 4))
    return Facts("made up", problems=tuple(map(_problem, problems, found)))


def _problem(problem: Problem, found: dict[tuple[str, Verdict], list[Draw]]) -> report.Problem:
    counts = Counter[str]()
    for (_, verdict), draws in found.items():
        counts[verdict.outcome] += len(draws)
    programs = tuple(
        Candidate(f"{problem.head.rstrip()}{text}", verdict.outcome, verdict.detail, tuple(draws))
        for (text, verdict), draws in found.items()
    )
    return report.Problem(
        str(problem.id),
        counts,
        len(found),
        30.0,
        0,
        problem.text,
        text_of_tests(problem.tests, problem.head),
        candidates=programs,
    )


def run_folder(path: Path, samples: int, chance: random.Random) -> RunFolder:
    """A run folder of HumanEval with made-up samples and verdicts."""
    problems = [read(record) for record in installed()]
    asked = [Asked(one, begun(one, False)) for one in problems]
    tokens = [np.frombuffer(one.text.encode(), np.uint8).astype(np.int32) for one in problems]
    prompts = describe_prompts([one.id for one in problems], tokens, [{}] * len(problems))
    params = {"temperature": 0.8, "seed": 0}
    folder = create(path, Manifest("made up", "float32", "f", "t", False, params, False, prompts, {}), asked)
    writer, found = ShardWriter(folder.shards, "0of1"), []
    for place, index, text, verdict in made_up_samples(problems, samples, chance):
        writer.write(place, {"id": problems[place].id, "index": index, "text": text, "tokens": [0] * (len(text) // 4)})
        found.append((place, index, text, verdict))
    writer.close()
    verdicts = Verdicts(folder)
    (path / "verdicts").mkdir()
    with (path / "verdicts" / "all.jsonl").open("w") as file:
        for place, index, text, verdict in found:
            name, key = problems[place].id, verdicts.of(place, text)[1]
            file.write(json.dumps({"id": name, "index": index, "key": key, **asdict(verdict)}) + "\n")
    return folder


def opening(browser: Browser, page: Path, width: int = 1400) -> float:
    """Seconds until a page is loaded and painted."""
    begun_at = time.perf_counter()
    browser.open(page, width)
    browser.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return time.perf_counter() - begun_at


def in_browser(browser: Browser, page: Path) -> dict[str, float]:
    """Seconds until the page is loaded and painted, until a problem's programs are open, and for a search in all."""
    opened = opening(browser, page)
    timed = """(async () => {
      const start = performance.now();
      %s
      while (!(%s)) await new Promise(done => setTimeout(done));
      return (performance.now() - start) / 1000;
    })()"""
    chip, box = "document.querySelector('.chips > details')", "document.getElementById('program-search')"
    problem = timed % (f"{chip}.open = true;", f"{chip}.querySelector('.held ol')")
    found = "document.getElementById('program-found').textContent"
    search = timed % (f"{box}.value = 'return'; {box}.dispatchEvent(new Event('input'));", found)
    return {"open_s": opened, "problem_s": browser.value(problem), "search_s": browser.value(search)}


def measure(folder: Path, samples: int, repeats: int, seed: int) -> dict[str, object]:
    """The numbers of a run of HumanEval with this many samples of each problem."""
    run = run_folder(folder, samples, random.Random(seed))
    start = time.perf_counter()
    facts = facts_of([run])
    read_s, start = time.perf_counter() - start, time.perf_counter()
    page, _ = write_report(facts, folder / "report.html")
    write_s = time.perf_counter() - start
    programs = [one for problem in facts.problems for one in problem.candidates]
    browser = Browser()
    try:
        rounds = [in_browser(browser, page) for _ in range(repeats)]
    finally:
        browser.close()
    return {
        "problems": len(facts.problems),
        "samples": facts.samples,
        "programs": len(programs),
        "program_bytes": sum(len(one.text) for one in programs),
        "page_bytes": page.stat().st_size,
        "read_s": read_s,
        "write_s": write_s,
        **{name: statistics.median(one[name] for one in rounds) for name in rounds[0]},
        "open_worst_s": max(one["open_s"] for one in rounds),
        "machine": platform.processor() or platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if CHROMIUM is None:
        parser.error("there is no chromium on the path to open the page in")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder) / "run", options.samples, options.repeats, options.seed)
    for name, value in found.items():
        print(f"{name:14} {value:,.3f}" if isinstance(value, float) else f"{name:14} {value}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
