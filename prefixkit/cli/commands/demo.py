"""``prefixkit demo``: a small campaign, in which a real model writes programs for real problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.syntax import Syntax

import prefixkit
from prefixkit.cli.commands.evaluate import judge_with_bar, open_judge
from prefixkit.cli.commands.sample import sample_prompted
from prefixkit.cli.errors import at_work
from prefixkit.cli.loading import DEMO, load_model, load_tokenizer, resolve
from prefixkit.cli.prompted import Prompted, Settings, prompted
from prefixkit.cli.report_view import show
from prefixkit.cli.run_facts import facts_of
from prefixkit.cli.terminal import line, visible
from prefixkit.cli.views import plant, show_tree
from prefixkit.evaluation.campaign.folder import RunFolder, check_place
from prefixkit.evaluation.judge import NoSandbox
from prefixkit.evaluation.report import write_report
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.prompting import Prompting, ask, solved
from prefixkit.evaluation.tasks.source import Source, read_problems
from prefixkit.sampling.params import SamplingParams

ASKED = ("HumanEval/22", "HumanEval/23", "HumanEval/28", "HumanEval/35")  # easy: a model this small solves some
SHOWN = ("HumanEval/13", "HumanEval/27", "HumanEval/42", "HumanEval/45", "HumanEval/60")  # the few-shot examples
GREEDY_TOKENS = 32


class NotExact(ValueError):
    """prefixkit and the unpatched model disagree."""


def run_demo(run: Path, samples: int, max_new_tokens: int, seed: int, console: Console) -> None:
    """Sample, draw, judge, report, and compare with the unpatched model."""
    params = SamplingParams(n=samples, temperature=0.6, top_p=0.95, max_new_tokens=max_new_tokens, seed=seed)
    check_place(run)
    settings = Settings(DEMO, dtype="float32", device="cpu", run=run)
    by_id = {problem.id: problem for problem in read_problems(Source(task="humaneval"))}
    problems = ask([by_id[name] for name in ASKED], Prompting(), [solved(by_id[name]) for name in SHOWN])
    location = resolve(DEMO, console)
    tokenizer = load_tokenizer(location)
    asked = prompted(tokenizer, problems, params, chat=True)
    tree, names = plant([one.tokens for one in asked], ASKED)
    title = f"{len(ASKED)} problems after the same {len(SHOWN)} solved examples, {samples} samples of each"
    show_tree(tree, names, tokenizer.decode, title, console, samples=samples)
    console.print()
    model = load_model(location, "float32", "cpu")
    folder = sample_prompted(model, tokenizer, asked, params, settings, True, console)
    assert folder is not None, "a run folder was given"
    _show_samples(folder, problems[0], tokenizer, console)
    _judge(folder, console)
    with at_work():
        check_greedy(model, tokenizer, asked, console)


def _judge(folder: RunFolder, console: Console) -> None:
    """Judge the candidates if a sandbox can be made, and write the report."""
    try:
        with folder.judging(), open_judge(False) as judge:
            judge_with_bar(folder, judge, "all", False, console)
    except NoSandbox as error:
        console.print(line(("nothing was judged: ", "yellow"), str(error)), soft_wrap=True)
    facts = facts_of([folder])
    show(facts, console)
    page, _ = write_report(facts, folder.path / "report.html")
    console.print(
        line(f"{facts.samples} candidate programs in {folder.path}; the report is ", (str(page), "bold")),
        soft_wrap=True,
    )


def _show_samples(folder: RunFolder, problem: Problem, tokenizer: Any, console: Console) -> None:
    """Draw where a problem's samples part, and show the first of them."""
    samples = sorted((one for one in folder.samples() if one["id"] == problem.id), key=lambda one: int(one["index"]))
    tree, names = plant([one["tokens"] for one in samples], [f"sample {one['index']}" for one in samples])
    show_tree(tree, names, tokenizer.decode, f"{problem.id}: where its samples part", console)
    console.print()
    console.print(line((f"{problem.id}: sample {samples[0]['index']}", "bold")))
    code = visible(problem.head.rstrip() + samples[0]["text"], keep="\n\t")
    console.print(Syntax(code, "python", background_color="default"))
    console.print()


def check_greedy(model: Any, tokenizer: Any, asked: Sequence[Prompted], console: Console) -> None:
    """Raise NotExact if all prompts in one batch get other greedy tokens than each alone from transformers'
    ``generate``.
    """
    prompts = [one.tokens for one in asked]
    ours = prefixkit.generate(model, tokenizer, prompts, temperature=0, max_new_tokens=GREEDY_TOKENS)
    prefixkit.unpatch(model)
    equal = 0
    for sample, one in zip(ours, asked, strict=True):
        ids = torch.tensor([one.tokens])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=GREEDY_TOKENS)
        theirs = out[0, ids.shape[1] :].tolist()
        if sample.tokens != theirs:
            raise NotExact(f"{one.asked.problem.id}: greedy gives {sample.tokens}, unpatched {theirs}")
        equal += len(theirs)
    said = f"Exactness: {equal} greedy tokens of {len(prompts)} prompts, identical to the unpatched model's."
    console.print(line(said))
