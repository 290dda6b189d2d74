"""What a decode step of an 8B Llama takes in a CUDA graph, with its layers as they are and through torch.compile.

    python -m benchmarks.compiled --out compiled.json

Sequences share 2,048 tokens and have 64 of their own.  ``attention: false`` is the same step whose attention returns at
once: the least that faster attention could leave.
"""

import dataclasses
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import prefixkit
from benchmarks.runner import Row, Run, arguments, captured, free_memory, replayed_ms, spread
from benchmarks.shapes import LLAMA_8B
from benchmarks.tree_attention.inputs import planner_for
from benchmarks.tree_attention.workloads import PAGE, workload
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step, build_step
from prefixkit.models import ModelRunner, kv_spec
from prefixkit.ops import library
from prefixkit.ops.backend import Backend, backend_for
from prefixkit.ops.kv_pool import KVPool

PREFIX, SUFFIX = 2048, 64


def random_pool(model: Any, batches: list[int]) -> KVPool:
    pool = KVPool(kv_spec(model), PREFIX // PAGE + max(batches) * -(-SUFFIX // PAGE), PAGE)
    for layer in range(pool.spec.num_layers):
        for kv in (pool.k(layer), pool.v(layer)):
            kv.normal_()
    return pool


def step_of(batch: int, planner: Planner) -> Step:
    work = workload(f"2L b{batch} p{PREFIX} s{SUFFIX}", LLAMA_8B.heads, LLAMA_8B.kv_heads)
    tokens = np.random.default_rng(batch).integers(0, LLAMA_8B.vocab, batch)
    return build_step(StepTree(work.snapshot, work.queries), tokens, np.arange(batch), planner, "cuda")


def without_attention(device: torch.device) -> Backend:
    """A backend whose tree_attention returns memory as it is; all else, appending included, stays."""

    def returns_at_once(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    return dataclasses.replace(backend_for(device), tree_attention=returns_at_once)


def step_ms(runner: ModelRunner, step: Step, replays: int) -> dict[str, float]:
    """Median and spread of replays of one captured step."""
    graph = captured(lambda: runner(step), torch.cuda.Stream())
    times = spread(replayed_ms(graph, replays + 3)[3:])
    del graph
    free_memory()
    return {"ms": times["median"], "least_ms": times["best"], "most_ms": times["worst"]}


def measure(run: Run, model: Any, batches: list[int], replays: int) -> None:
    pool = random_pool(model, batches)
    spec = pool.spec
    planner = planner_for(LLAMA_8B.heads, spec.kv_heads, spec.head_dim, spec.device, spec.dtype)
    runners = {"eager": ModelRunner(model, pool), "compiled": ModelRunner(model, pool, compiled=True)}
    layers = runners["compiled"].compiled
    assert layers is not None
    for batch in batches:
        step = step_of(batch, planner)
        for name, runner in runners.items():
            graphs, seconds, began = layers.graphs, layers.seconds, time.perf_counter()
            runner(step)
            torch.cuda.synchronize()
            row: Row = {"batch": batch, "modules": name, "first_step_s": time.perf_counter() - began}
            if name == "compiled":
                made = {"graphs": layers.graphs - graphs, "compile_s": layers.seconds - seconds}
                row |= made | {"fallback": layers.reason}
            for attention in (True, False):
                backend = backend_for if attention else without_attention
                with mock.patch.object(library, "backend_for", backend):
                    row = row | {"attention": attention, **step_ms(runner, step, replays)}
                text = f"{'with' if attention else 'without':8s} attention {row['ms']:7.2f} ms"
                run.add("rows", row, f"batch {batch:5d}  {name:9s} {text}")


def main() -> None:
    options = arguments(__doc__, batches=[64, 256, 1024], layers=LLAMA_8B.layers, replays=15)
    run = Run(options)
    run.result["layers"] = options.layers
    model = prefixkit.patch(LLAMA_8B.build("cuda", torch.bfloat16, layers=options.layers))
    measure(run, model, options.batches, options.replays)
    run.result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    run.finish("peak_gib", "seconds")


if __name__ == "__main__":
    main()
