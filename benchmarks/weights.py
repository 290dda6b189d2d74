"""The time in which a call checks that its KV was computed with the model's present weights; random weights.

    python -m benchmarks.weights [--device cpu] [--shapes SmolLM2-135M] [--out FILE]

*state*: the check of the modules and their attributes.  *sample*: ``kv_version``, which each call runs: *state*,
counters and a sample of every tensor.  *all*: all memory is compared.  *call*: a whole call of a session that samples
one token of a prompt whose KV it has; ``share`` is the share of *sample* in it.  Milliseconds, medians.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import prefixkit
from benchmarks.runner import Row, Run, arguments
from benchmarks.shapes import SHAPES
from prefixkit import Session
from prefixkit.models.weights.content import kv_version
from prefixkit.models.weights.state import state_of


def milliseconds(call: Callable[[], Any], turns: int) -> float:
    took = []
    for _ in range(turns):
        began = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(took), 3)


def measure(model: Any, prompt: int, turns: int) -> Row:
    row: Row = {"weights_GB": round(sum(one.nbytes for one in model.parameters()) / 1e9, 2)}
    kv_version(model)
    row["state"] = milliseconds(lambda: state_of(model), turns)
    row["sample"] = milliseconds(lambda: kv_version(model), turns)
    prefixkit.patch(model, compare_weights="always")
    row["all"] = milliseconds(lambda: kv_version(model, lambda: 1 << 30), max(3, turns // 10))
    prefixkit.patch(model)
    with Session(model, kv_budget="1GiB") as session:
        tokens = list(range(100, 100 + prompt))

        def call() -> Any:
            return session.generate([tokens], max_new_tokens=1, temperature=0.0, stop_token_ids=())

        call(), call()
        row["call"] = milliseconds(call, turns)
    return row | {"share": round(row["sample"] / row["call"], 4)}


def main() -> None:
    options = arguments(__doc__, device="cuda", shapes=["Llama-3.1-8B", "SmolLM2-135M"], prompt=16, turns=50)
    run = Run(options, options.device)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    for name in options.shapes:
        model = prefixkit.patch(SHAPES[name].build(options.device, dtype))
        run.add("weights", {"shape": name, "dtype": str(dtype), **measure(model, options.prompt, options.turns)})
        del model
    run.finish("shapes")


if __name__ == "__main__":
    main()
