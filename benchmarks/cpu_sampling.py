"""Parallel sampling of a real model on one CPU thread: stock ``generate``, prefill-once + expand, and prefixkit.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_sampling [--case three-level] --out benchmarks/results/cpu_sampling.json

Tokens per second of wall time and of CPU time, and how far memory grew, each system in a process of its own.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner import Row, Run, arguments, table

SAMPLING = {"temperature": 0.8, "top_p": 0.95}


def prompts_of(case: str, tokenizer: Any) -> tuple[list[list[int]], int]:
    """The case's prompts as token ids, and samples per prompt."""
    from prefixkit.evaluation.tasks.prompting import Prompting, ask, solved
    from prefixkit.evaluation.tasks.source import Source, load

    problems = load(Source(task="humaneval"))
    (first,) = ask(problems[:1], Prompting(), [solved(problem) for problem in problems[1:12]])
    shots = tokenizer(first.text).input_ids
    if case == "one-prompt":
        return [shots[:1000]], 32
    heads = [tokenizer(problem.head).input_ids[:150] for problem in problems[20:28]]
    return [shots[:1000] + head for head in heads], 16


def run_stock(model: Any, tokenizer: Any, prompts: list[list[int]], n: int, new: int) -> int:
    """``model.generate`` with num_return_sequences: the prompt is repeated n times and prefilled n times."""
    lengths = {"min_new_tokens": new, "max_new_tokens": new, "num_return_sequences": n}
    for prompt in prompts:
        given = {"attention_mask": torch.ones(1, len(prompt), dtype=torch.long), "pad_token_id": 0}
        out = model.generate(torch.tensor([prompt]), do_sample=True, top_k=0, **given, **lengths, **SAMPLING)
        assert out.shape == (n, len(prompt) + new), out.shape
    return len(prompts) * n * new


def run_prefill_once(model: Any, tokenizer: Any, prompts: list[list[int]], n: int, new: int) -> int:
    """Prefill each prompt once, repeat its KV cache n times, then decode n rows: what a careful user writes by hand."""
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    warm, nucleus = TemperatureLogitsWarper(SAMPLING["temperature"]), TopPLogitsWarper(SAMPLING["top_p"])

    def sample(logits: Tensor) -> Tensor:
        return torch.multinomial(nucleus(None, warm(None, logits.float())).softmax(-1), 1)

    with torch.inference_mode():
        tokens = [list(islice(prefill_once(model, torch.tensor([ids]), n, sample), new)) for ids in prompts]
    return sum(len(step) for steps in tokens for step in steps)


def prefill_once(model: Any, ids: Tensor, n: int, sample: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """The next tokens ``[n, 1]`` of so many samples of the prompt ``ids [1, tokens]``, step after step."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(n)
    logits = logits.expand(n, -1)
    while True:
        yield (tokens := sample(logits))
        logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


def run_prefixkit(model: Any, tokenizer: Any, prompts: list[list[int]], n: int, new: int) -> int:
    """prefixkit.generate on all prompts at once."""
    import prefixkit

    prefixkit.patch(model)
    ends = {"max_new_tokens": new, "stop_token_ids": ()}
    samples = list(result := prefixkit.generate(model, tokenizer, prompts, n=n, seed=0, **ends, **SAMPLING))
    assert len(samples) == len(prompts) * n and all(len(sample.tokens) == new for sample in samples)
    print(result.report, file=sys.stderr)
    return len(samples) * new


RUN = {"stock": run_stock, "prefill_once": run_prefill_once, "prefixkit": run_prefixkit}


def measure(system: str, case: str, new: int) -> Row:
    """Load the model, warm up on a short prompt, run once; in this process."""
    from prefixkit.evaluation.demo.model import load_demo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = load_demo()
    prompts, n = prompts_of(case, tokenizer)
    RUN[system](model, tokenizer, [prompts[0][:20]], 2, 2)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # resident (Linux)
    began, cpu_began = time.perf_counter(), time.process_time()
    tokens = RUN[system](model, tokenizer, prompts, n, new)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    growth = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20
    row: Row = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}
    row |= {"tokens_per_second": tokens / seconds, "tokens_per_cpu_second": tokens / cpu_seconds}
    return row | {"memory_growth_mib": growth, "prompt_tokens": statistics.mean(map(len, prompts))}


def main() -> None:
    case = {"choices": ("one-prompt", "three-level"), "default": "one-prompt"}
    systems = {"nargs": "+", "choices": RUN, "default": list(RUN)}
    repeats = {"type": int, "default": 1, "help": "runs of each system, in turns; the median is reported"}
    options = arguments(__doc__, case=case, new=64, systems=systems, repeats=repeats)
    run = Run(options, "cpu")
    run.result |= {"case": options.case, "new_tokens": options.new, **run.result["machine"]}
    found: dict[str, list[Row]] = {system: [] for system in options.systems}
    for system in options.repeats * options.systems:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found[system].append(process.submit(measure, system, options.case, options.new).result())
        print(f"{system:14}{found[system][-1]['tokens_per_second']:10.1f} tokens/s", flush=True)
    results = {of: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for of, rows in found.items()}
    run.result["results"] = results
    run.finish()
    ours, rows = results.get("prefixkit"), []
    for system, row in results.items():
        cells = [f"{row[key]:.1f}" for key in ("seconds", "cpu_seconds", "tokens_per_second", "memory_growth_mib")]
        if ours:
            cells += [f"{ours[rate] / row[rate]:.2f}x" for rate in ("tokens_per_second", "tokens_per_cpu_second")]
            cells.append(f"{row['memory_growth_mib'] / max(ours['memory_growth_mib'], 1e-9):.1f}x")
        rows.append((system, *cells))
    head = ("system", "seconds", "CPU s", "tokens/s", "growth MiB", "prefixkit is", "by CPU s", "memory")
    print(f"\n{options.case}, {options.new} new tokens a sample, one thread\n")
    print(table(head if ours else head[:5], rows))


if __name__ == "__main__":
    main()
