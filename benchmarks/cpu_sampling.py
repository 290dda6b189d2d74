"""Parallel sampling of a real model on one CPU thread: stock ``generate``, prefill-once + expand, and prefixkit.

Each system runs in a process of its own, one after the other, and reports tokens per second (of wall time, and of the thread's
own CPU time, which a busy machine disturbs less) and how far its resident memory grew over the loaded model.  All draw at
temperature 0.8, top_p 0.95, in float32, and none may stop early.

    OMP_NUM_THREADS=1 python benchmarks/cpu_sampling.py --out benchmarks/results/cpu_sampling.json
    OMP_NUM_THREADS=1 python benchmarks/cpu_sampling.py --case three-level --out ...
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSTEMS = ("stock", "prefill_once", "prefixkit")
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


def prompts_of(case: str, tokenizer: Any) -> tuple[list[list[int]], int]:
    """The case's prompts as token ids, and samples per prompt."""
    from prefixkit.demo.humaneval import load_problems, plain_text

    problems = load_problems()
    shots = tokenizer(plain_text(problems[0], problems[1:12])).input_ids
    if case == "one-prompt":
        return [shots[:1000]], 32
    heads = [tokenizer(problem.head).input_ids[:150] for problem in problems[20:28]]
    return [shots[:1000] + head for head in heads], 16


def run_stock(model: Any, tokenizer: Any, prompts: list[list[int]], n: int, new: int) -> int:
    """``model.generate`` with num_return_sequences: the prompt is repeated n times and prefilled n times."""
    import torch

    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=True,
            num_return_sequences=n,
            min_new_tokens=new,
            max_new_tokens=new,
            top_k=0,
            pad_token_id=0,
            **SAMPLING,
        )
        assert out.shape == (n, len(prompt) + new), out.shape
    return len(prompts) * n * new


def run_prefill_once(model: Any, tokenizer: Any, prompts: list[list[int]], n: int, new: int) -> int:
    """Prefill each prompt once, repeat its KV cache n times, then decode n rows: what a careful user writes by hand."""
    import torch
    from transformers import DynamicCache
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

    warm, nucleus = TemperatureLogitsWarper(SAMPLING["temperature"]), TopPLogitsWarper(SAMPLING["top_p"])
    with torch.inference_mode():
        for prompt in prompts:
            cache = DynamicCache(config=model.config)
            logits = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits[:, -1]
            cache.batch_repeat_interleave(n)
            logits = logits.expand(n, -1)
            for step in range(new):
                scores = nucleus(None, warm(None, logits.float()))
                tokens = torch.multinomial(scores.softmax(-1), 1)
                if step < new - 1:
                    logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return len(prompts) * n * new


def run_prefixkit(model: Any, tokenizer: Any, prompts: list[list[int]], n: int, new: int) -> int:
    """prefixkit.generate on all prompts at once."""
    import prefixkit

    prefixkit.patch(model)
    result = prefixkit.generate(
        model, tokenizer, prompts, n=n, max_new_tokens=new, stop_token_ids=(), seed=0, **SAMPLING
    )
    samples = list(result)
    assert len(samples) == len(prompts) * n and all(len(sample.tokens) == new for sample in samples)
    print(result.report, file=sys.stderr)
    return len(samples) * new


RUN: dict[str, Callable[[Any, Any, list[list[int]], int, int], int]] = {
    "stock": run_stock,
    "prefill_once": run_prefill_once,
    "prefixkit": run_prefixkit,
}


def resident() -> int:
    """Bytes resident now (Linux)."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def measure(system: str, case: str, new: int) -> dict[str, float]:
    """Load the model, warm up on a short prompt, run once; in this process."""
    import torch

    from prefixkit.demo.model import load_demo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = load_demo()
    prompts, n = prompts_of(case, tokenizer)
    RUN[system](model, tokenizer, [prompts[0][:20]], 2, 2)
    before = resident()
    began, cpu_began = time.perf_counter(), time.process_time()
    tokens = RUN[system](model, tokenizer, prompts, n, new)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "memory_growth_mib": max(0, peak - before) / 2**20,
        "prompt_tokens": statistics.mean(len(prompt) for prompt in prompts),
    }


def versions() -> dict[str, str]:
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("one-prompt", "three-level"), default="one-prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens per sample")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each system; the median is reported")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.case, args.new)))
        return
    results: dict[str, dict[str, float]] = {}
    for system in args.systems:
        command = [sys.executable, __file__, "--child", system, "--case", args.case, "--new", str(args.new)]
        runs = []
        for _ in range(args.repeats):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        results[system] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(f"{system:14}{results[system]['tokens_per_second']:10.1f} tokens/s", flush=True)
    report(args.case, args.new, results, args.out)


def report(case: str, new: int, results: dict[str, dict[str, float]], out: Path | None) -> None:
    ours = results.get("prefixkit")
    print(f"\n{case}, {new} new tokens a sample, one thread")
    head = ("system", "seconds", "CPU s", "tokens/s", "growth MiB", "prefixkit is", "by CPU s", "memory")
    print(f"{head[0]:14}" + "".join(f"{title:>13}" for title in head[1:]))
    for system, row in results.items():
        cells = [f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['tokens_per_second']:.1f}"]
        cells.append(f"{row['memory_growth_mib']:.0f}")
        if ours:
            cells.append(f"{ours['tokens_per_second'] / row['tokens_per_second']:.2f}x")
            cells.append(f"{ours['tokens_per_cpu_second'] / row['tokens_per_cpu_second']:.2f}x")
            cells.append(f"{row['memory_growth_mib'] / ours['memory_growth_mib']:.1f}x")
        print(f"{system:14}" + "".join(f"{cell:>13}" for cell in cells))
    if out:
        out.write_text(json.dumps({"case": case, "new_tokens": new, **versions(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
