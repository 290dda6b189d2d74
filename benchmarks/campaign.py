"""Tokens per second of a campaign against those of the engine: SmolLM2-135M-Instruct on HumanEval, few-shot.

    python -m benchmarks.campaign [--device cuda --dtype bfloat16 --compiled] [--problems 160] [--samples 50] [--out F]
    python -m benchmarks.campaign --only "stop strings,engine"

Tokens per second of second calls of one session: *engine*, only token ids, all samples of one length; *stop ids*,
samples end at a token that is an empty line; *text*, the same with text; *stop strings*, samples end at one of five
strings; *command*, ``prefixkit sample --run`` with these strings, without its start: the model is loaded already, and
the time to capture graphs is left out.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import prefixkit
from benchmarks.runner import Row, Run, arguments
from prefixkit import SamplingParams, Session
from prefixkit.cli.commands.sample import sample_prompted
from prefixkit.cli.prompted import Prompted, Settings, prompted
from prefixkit.evaluation.demo.model import load_demo
from prefixkit.evaluation.tasks.prompting import Prompting
from prefixkit.evaluation.tasks.source import Source, load

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


def params_of(options: argparse.Namespace, **fields: Any) -> SamplingParams:
    most = {"max_new_tokens": options.longest}
    return SamplingParams(n=options.samples, temperature=0.8, top_p=0.95, seed=1, **most | fields)


def decoded(tokenizer: Any) -> list[str]:
    """The text of each token."""
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]


def calls(model: Any, tokenizer: Any, asked: list[Prompted], options: argparse.Namespace, run: Run) -> None:
    """Calls of one session, each timed after one that warms its graphs."""
    ids = [one.tokens for one in asked]
    with Session(model, tokenizer, compiled=options.compiled, most_running=options.in_flight) as texts:
        mean = float(options.longest)
        ends = {"stop_token_ids": [i for i, text in enumerate(decoded(tokenizer)) if text[1:] and not text.strip("\n")]}
        cases: dict[str, Row] = {"stop strings": {"stop": STOPS}, "text": ends, "stop ids": ends}
        cases["engine"] = {"stop_token_ids": ()}  # the last case: as long as the others' samples on average
        for name, fields in cases.items():
            if name not in options.only:
                continue
            texts.tokenizer = tokenizer if name in ("text", "stop strings") else None
            if name == "engine":
                fields = fields | {"max_new_tokens": max(1, round(mean))}
            for turn in range(options.turns + 1):
                began = time.perf_counter()
                params = params_of(options, **fields)
                found = texts.generate(ids, params, return_samples=False, on_sample=lambda _: None)
                took, tokens = time.perf_counter() - began, found.report.new_tokens
                if turn:
                    row = {"case": name, "tokens": tokens, "seconds": round(took, 3), "tokens/s": round(tokens / took)}
                    row |= {"mean tokens": round(tokens / found.report.samples, 1), "captures": found.report.captures}
                    run.add("rows", row)
            mean = tokens / found.report.samples


def command(model: Any, tokenizer: Any, asked: list[Prompted], options: argparse.Namespace, run: Run) -> None:
    """The work of ``prefixkit sample`` after the model is loaded."""
    params = params_of(options, stop=STOPS)
    for turn in range(options.turns + 1):
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
            settings = Settings(
                "demo",
                Prompting(few_shot=options.few_shot),
                chat=False,
                run=Path(folder, "run"),
                in_flight=options.in_flight,
                compiled=options.compiled,
            )
            console = Console(file=nowhere, force_terminal=True)
            made = sample_prompted(model, tokenizer, asked, params, settings, False, console)
            assert made is not None
            ended = next(event for event in reversed(list(made.history())) if event["event"] == "ended")
        took, report = ended["seconds"] - ended["report"]["seconds_capturing"], ended["report"]
        row = {"case": "command", "tokens": ended["tokens"], "seconds": round(took, 3)}
        row |= {"tokens/s": round(ended["tokens"] / took), "mean tokens": round(ended["tokens"] / report["samples"], 1)}
        if turn:
            run.add("rows", row)


def main() -> None:
    choices: Row = {"choices": ("float32", "bfloat16", "float16"), "default": "float32"}
    sizes: Row = {"problems": 160, "samples": 50, "few_shot": 4, "longest": 512, "in_flight": 1024, "turns": 1}
    only = ["stop strings", "text", "stop ids", "engine", "command"]
    options = arguments(__doc__, device="cpu", dtype=choices, compiled=False, only=only, **sizes)
    run = Run(options, options.device)
    model, tokenizer = load_demo()
    model = prefixkit.patch(model.to(options.device, getattr(torch, options.dtype)))  # type: ignore[arg-type]
    problems = load(Source(task="humaneval", limit=options.problems), Prompting(few_shot=options.few_shot))
    asked = prompted(tokenizer, problems, params_of(options, stop=STOPS), chat=False)
    calls(model, tokenizer, asked, options, run)
    if "command" in options.only:
        command(model, tokenizer, asked, options, run)
    run.finish()


if __name__ == "__main__":
    main()
