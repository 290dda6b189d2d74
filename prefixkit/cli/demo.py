"""``prefixkit demo``: programs for real problems from a real model, and what their shared prefixes saved."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from transformers.utils import logging as transformers_logging

import prefixkit
from prefixkit.api import Result
from prefixkit.cli.loading import DEMO, load_model, load_tokenizer, resolve
from prefixkit.cli.output import LineFile
from prefixkit.cli.prompts import encode_prompts, task_prompts
from prefixkit.cli.report_view import headline, show_report
from prefixkit.cli.savings import plant
from prefixkit.cli.stream import Batch, stream
from prefixkit.cli.terminal import line, visible
from prefixkit.cli.tree_view import View, show_tree
from prefixkit.demo.humaneval import CHAT_STOP, Problem, load_problems
from prefixkit.sampling.params import SamplingParams

ASKED = ("HumanEval/22", "HumanEval/23", "HumanEval/28", "HumanEval/35")  # easy: a model this small solves some
SHOWN = ("HumanEval/13", "HumanEval/27", "HumanEval/42", "HumanEval/45", "HumanEval/60")  # the few-shot examples
GREEDY_TOKENS = 32


@dataclass(frozen=True)
class DemoOptions:
    """How large the demo is, and where its samples go."""

    out: Path
    samples: int = 8
    max_new_tokens: int = 96
    seed: int = 0


def run_demo(options: DemoOptions, console: Console) -> None:
    """Sample, draw, report, and compare with the unpatched model.

    Raises:
        NotExact: The unpatched model draws other tokens.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the demo has a bar of its own
    params = SamplingParams(
        n=options.samples,
        temperature=0.6,
        top_p=0.95,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        stop=CHAT_STOP,
    )
    by_id = {problem.id: problem for problem in load_problems()}
    problems = [by_id[name] for name in ASKED]
    with LineFile(options.out, overwrite=True) as out:
        location = resolve(DEMO, lambda message: console.print(line(f"{message} …")))
        tokenizer = load_tokenizer(location)
        prompts = task_prompts(problems, [by_id[name] for name in SHOWN])
        batch = Batch(ASKED, encode_prompts(tokenizer, prompts, chat=True))
        model = load_model(location, "float32", "cpu")
        _draw_prompts(batch, options.samples, tokenizer, console)
        result = stream(model, tokenizer, batch, params, out, console)
    _show_samples(result, problems[0], tokenizer, console)
    show_report(result.report, headline(result.report), console)
    valid = sum(is_python(problems[sample.prompt_index].head, sample.text) for sample in result)
    console.print(
        line(
            f"{out.lines} candidate programs in ",
            (out.name, "bold"),
            f", {valid} of them valid Python (none was run)",
        ),
        soft_wrap=True,
    )
    check_greedy(model, tokenizer, batch, console)


def _draw_prompts(batch: Batch, samples: int, tokenizer: Any, console: Console) -> None:
    forest = plant(batch.tokens, [str(name) for name in batch.ids], page_size=16)
    title = f"{len(batch.ids)} problems after the same {len(SHOWN)} solved examples, {samples} samples of each"
    show_tree(forest.tree, View(forest.names, tokenizer.decode, samples), title, console)
    console.print()


def _show_samples(result: Result, problem: Problem, tokenizer: Any, console: Console) -> None:
    """How far a problem's samples agree, and the one the model finds likeliest."""
    samples = result.of_prompt(0)
    forest = plant(
        [sample.tokens for sample in samples], [f"sample {sample.index}" for sample in samples], page_size=16
    )
    show_tree(forest.tree, View(forest.names, tokenizer.decode), f"{problem.id}: where its samples part", console)
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


class NotExact(ValueError):
    """prefixkit and the unpatched model disagree."""


def check_greedy(model: Any, tokenizer: Any, batch: Batch, console: Console) -> None:
    """Greedy tokens of all prompts sampled together, against the unpatched model on each prompt alone.

    Raises:
        NotExact: They differ.
    """
    ours = prefixkit.generate(model, tokenizer, batch.tokens, temperature=0, max_new_tokens=GREEDY_TOKENS)
    prefixkit.unpatch(model)
    equal = 0
    for sample, prompt in zip(ours, batch.tokens, strict=True):
        theirs = greedy(model, prompt, GREEDY_TOKENS)
        if sample.tokens != theirs:
            raise NotExact(f"{batch.ids[sample.prompt_index]}: greedy gives {sample.tokens}, unpatched {theirs}")
        equal += len(theirs)
    said = f"Exactness: {equal} greedy tokens of {len(batch.ids)} prompts, identical to the unpatched model's."
    console.print(line(said))


def greedy(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What transformers' own ``generate`` draws for one prompt."""
    import torch

    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
    return [int(token) for token in out[0, ids.shape[1] :]]
