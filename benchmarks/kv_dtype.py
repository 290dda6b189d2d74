"""What K and V in e4m3 change: log-probabilities of known texts, and how many of a model's programs pass.

    OMP_NUM_THREADS=1 python -m benchmarks.kv_dtype --out benchmarks/results/cpu_kv_dtype.json
    python -m benchmarks.kv_dtype --device cuda --dtype bfloat16

SmolLM2-135M-Instruct over HumanEval.  *nll*: nats per token of the reference solutions behind their heads; *rms*,
*most*: of the difference of a token's log-probability from that under K and V in the model's dtype.  *passed*: of
``--samples`` programs for each of the ``--problems`` with the shortest solutions, at temperature 0.6; *interval*: how
far that number of two runs of one model is apart at most, 95 times in 100.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

import prefixkit
from benchmarks.real_model import passes
from benchmarks.runner import Run, arguments
from prefixkit.evaluation.demo.model import load_demo
from prefixkit.evaluation.tasks.encode import encode
from prefixkit.evaluation.tasks.source import Source, load
from prefixkit.evaluation.tasks.wording import FENCE_STOP
from prefixkit.models.kv_dtype import KVDtype

DTYPES: tuple[KVDtype | None, ...] = (None, "fp8")


def main() -> None:
    sizes = {"texts": 40, "problems": 8, "samples": 16}
    options = arguments(__doc__, device="cpu", dtype="float32", **sizes)
    run = Run(options, options.device)
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
