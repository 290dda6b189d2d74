"""The effect of K and V in e4m3 on log-probabilities of known texts, and on how many of a model's programs pass.

    OMP_NUM_THREADS=1 python -m benchmarks.kv_dtype --out benchmarks/results/cpu_kv_dtype.json
    python -m benchmarks.kv_dtype --device cuda --dtype bfloat16
    python -m benchmarks.kv_dtype --steps           # decode steps against those over bfloat16; 110 GiB of GPU memory

SmolLM2-135M-Instruct over HumanEval.  *nll*: nats per token of the reference solutions after their heads; *rms*,
*most*: root mean square and maximum of the difference between a token's log-probability and that under K and V in the
model's dtype.  *passed*: how many of ``--samples`` programs for each of the ``--problems`` with the shortest solutions
pass, at temperature 0.6; *interval*: the largest difference of that number between two runs of one model, 95 times in
100.

``--steps``: decode steps with random bf16 weights that mostly read own tokens, each as a CUDA graph over pages of
random numbers, with transformers' eager layers: milliseconds, and bytes of KV of a token.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

import prefixkit
from benchmarks.engine import decode_step, random_pool, step_ms
from benchmarks.real_model import passes
from benchmarks.runner import Row, Run, arguments, free_memory
from benchmarks.shapes import SHAPES, Shape
from benchmarks.tree_attention.workloads import workload
from prefixkit.attention.sharing import HeadShape
from prefixkit.evaluation.demo.model import load_demo
from prefixkit.evaluation.tasks.encode import encode
from prefixkit.evaluation.tasks.source import Source, load
from prefixkit.evaluation.tasks.wording import FENCE_STOP
from prefixkit.models import ModelRunner, kv_spec
from prefixkit.models.kv_dtype import KVDtype
from prefixkit.ops.backend import backend_for

DTYPES: tuple[KVDtype | None, ...] = (None, "fp8")
STEPS = {"Llama-3.1-8B": "2L b32 p16 s16384", "Llama-3.2-1B": "2L b64 p16 s32768"}


def measure_step(shape: Shape, tree: str) -> Row:
    """A decode step over this tree, by the dtype of pages."""
    work = workload(tree, shape.heads, shape.kv_heads)
    model: Any = shape.build("cuda", torch.bfloat16)
    row: Row = {"shape": shape.name, "tree": tree}
    for kv_dtype in DTYPES:
        spec = kv_spec(prefixkit.patch(model, kv_dtype=kv_dtype))
        heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim, spec.dtype.itemsize)
        planner = backend_for(spec.device).planner_for(heads, spec.device, torch.bfloat16)
        runner = ModelRunner(model, random_pool(spec, int(work.snapshot.page_indptr[-1])))
        row[f"{kv_dtype or 'bfloat16'}_ms"] = step_ms(runner, decode_step(work, planner, shape.vocab))["ms"]
        row[f"{kv_dtype or 'bfloat16'}_bytes_per_token"] = spec.bytes_per_token
        del runner
        free_memory()
    prefixkit.unpatch(model)
    return row | {"fp8 / bfloat16": round(row["fp8_ms"] / row["bfloat16_ms"], 3)}


def main() -> None:
    sizes = {"texts": 40, "problems": 8, "samples": 16}
    options = arguments(__doc__, device="cpu", dtype="float32", **sizes, steps=False)
    run = Run(options, "cuda" if options.steps else options.device)
    if options.steps:
        for name, tree in STEPS.items():
            run.add("steps", measure_step(SHAPES[name], tree))
            free_memory()
        return run.finish()
    model, tokenizer = load_demo()
    model = model.to(options.device, getattr(torch, options.dtype))
    every = load(Source(task="humaneval"))
    heads = [tokenizer(problem.head)["input_ids"] for problem in every[: options.texts]]
    bodies = [[tokenizer(one.solution[len(one.head) :])["input_ids"]] for one in every[: options.texts]]
    short = sorted(every, key=lambda one: (len(one.solution) - len(one.head), one.id))[: options.problems]
    asked = [encode(tokenizer, problem, chat=True) for problem in short]
    exact, passed = np.empty(0), dict[KVDtype | None, np.ndarray[Any, Any]]()
    for kv_dtype in DTYPES:
        prefixkit.patch(model, kv_dtype=kv_dtype)
        scores = prefixkit.score(model, tokenizer, heads, bodies)
        found = np.concatenate([score.logprobs for (score,) in scores])
        exact = exact if len(exact) else found
        how = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 160, "stop": FENCE_STOP, "seed": 1}
        result = prefixkit.generate(model, tokenizer, asked, n=options.samples, **how)
        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(lambda sample: passes(short[sample.prompt_index], sample.text), result))
        passed[kv_dtype] = np.bincount(
            [s.prompt_index for s, ok in zip(result, won, strict=True) if ok], minlength=len(short)
        )
        difference = found - exact
        row = {"kv_dtype": kv_dtype or options.dtype, "tokens": len(found), "nll": -float(found.mean())}
        row |= {"rms": float(np.sqrt(np.square(difference).mean())), "most": float(np.abs(difference).max())}
        row |= {"passed": int(passed[kv_dtype].sum()), "of": len(won), "by_problem": passed[kv_dtype].tolist()}
        run.add("rows", row)
    both = sum(passed.values()) / (2 * options.samples)
    wide = 1.96 * math.sqrt(2 * options.samples * float((both * (1 - both)).sum()))
    run.result["interval"] = round(wide, 1)
    run.finish()


if __name__ == "__main__":
    main()
