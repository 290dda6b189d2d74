"""``prefixkit demo``: programs for real problems from a real model, and what their shared prefixes saved."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.syntax import Syntax
from transformers.utils import logging as transformers_logging

import prefixkit
from prefixkit.cli.loading import DEMO, load_model, load_tokenizer, resolve
from prefixkit.cli.output import LineFile
from prefixkit.cli.prompts import encode_prompts, task_prompts
from prefixkit.cli.sample import stream
from prefixkit.cli.terminal import line, visible
from prefixkit.cli.views import plant, show_report, show_tree
from prefixkit.demo.humaneval import CHAT_STOP, Problem, load_problems
from prefixkit.sampling.params import SamplingParams
from prefixkit.session import Result

ASKED = ("HumanEval/22", "HumanEval/23", "HumanEval/28", "HumanEval/35")  # easy: a model this small solves some
SHOWN = ("HumanEval/13", "HumanEval/27", "HumanEval/42", "HumanEval/45", "HumanEval/60")  # the few-shot examples
GREEDY_TOKENS = 32


class NotExact(ValueError):
    """prefixkit and the unpatched model disagree."""


def run_demo(out: Path, samples: int, max_new_tokens: int, seed: int, console: Console) -> None:
    """Sample, draw, report, and compare with the unpatched model."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the demo has a bar of its own
    params = SamplingParams(
        n=samples, temperature=0.6, top_p=0.95, max_new_tokens=max_new_tokens, seed=seed, stop=CHAT_STOP
    )
    by_id = {problem.id: problem for problem in load_problems()}
    problems = [by_id[name] for name in ASKED]
    with LineFile(out, overwrite=True) as file:
        location = resolve(DEMO, console)
        tokenizer = load_tokenizer(location)
        prompts = encode_prompts(tokenizer, task_prompts(problems, [by_id[name] for name in SHOWN]), chat=True)
        model = load_model(location, "float32", "cpu")
        tree, names = plant(list(prompts.values()), ASKED)
        title = f"{len(ASKED)} problems after the same {len(SHOWN)} solved examples, {samples} samples of each"
        show_tree(tree, names, tokenizer.decode, title, console, samples=samples)
        console.print()
        result = stream(model, tokenizer, prompts, params, file, console)
    _show_samples(result, problems[0], tokenizer, console)
    show_report(result.report, result.report.headline, console)
    valid = sum(is_python(problems[sample.prompt_index].head, sample.text) for sample in result)
    said = (
        f"{file.lines} candidate programs in ",
        (file.name, "bold"),
        f", {valid} of them valid Python (none was run)",
    )
    console.print(line(*said), soft_wrap=True)
    check_greedy(model, tokenizer, prompts, console)


def _show_samples(result: Result, problem: Problem, tokenizer: Any, console: Console) -> None:
    """How far a problem's samples agree, and the one the model finds likeliest."""
    samples = result.of_prompt(0)
    tree, names = plant([sample.tokens for sample in samples], [f"sample {sample.index}" for sample in samples])
    show_tree(tree, names, tokenizer.decode, f"{problem.id}: where its samples part", console)
    best = max(samples, key=lambda sample: sum(sample.logprobs))
    console.print()
    console.print(line((f"{problem.id}: sample {best.index}, the likeliest", "bold")))
    code = visible(problem.head.rstrip() + best.text, keep="\n\t")
    console.print(Syntax(code, "python", background_color="default"))
    console.print()


def is_python(head: str, text: str) -> bool:
    """Whether the candidate parses; nothing is run."""
    try:
        ast.parse(head.rstrip() + text)
    except (SyntaxError, ValueError):
        return False
    return True


def check_greedy(model: Any, tokenizer: Any, prompts: Mapping[str | int, Sequence[int]], console: Console) -> None:
    """NotExact where all prompts together get other greedy tokens than from transformers' ``generate``, each alone."""
    ours = prefixkit.generate(model, tokenizer, prompts.values(), temperature=0, max_new_tokens=GREEDY_TOKENS)
    prefixkit.unpatch(model)
    equal = 0
    for sample, (name, prompt) in zip(ours, prompts.items(), strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=GREEDY_TOKENS)
        theirs = out[0, ids.shape[1] :].tolist()
        if sample.tokens != theirs:
            raise NotExact(f"{name}: greedy gives {sample.tokens}, unpatched {theirs}")
        equal += len(theirs)
    said = f"Exactness: {equal} greedy tokens of {len(prompts)} prompts, identical to the unpatched model's."
    console.print(line(said))
