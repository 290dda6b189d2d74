"""What a decode step of an 8B Llama takes in a CUDA graph, with its layers as they are and through torch.compile.

    python benchmarks/compiled.py --out compiled.json

Random bf16 weights and KV; sequences that share 2,048 tokens and have 64 of their own.  ``attention: false`` is the same step
whose attention returns at once: the least that faster attention could leave.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import prefixkit
from benchmarks.tree_attention.workloads import PAGE, workload
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import Planner, Step, build_step, planner_for
from prefixkit.models import ModelRunner, kv_spec
from prefixkit.ops import backend
from prefixkit.ops import library as ops
from prefixkit.ops.kv_pool import KVPool

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
PREFIX, SUFFIX = 2048, 64


def random_model(layers: int) -> LlamaForCausalLM:
    """Made where it stays, by one kind of random number: loading would take longer than all else."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers})).to(torch.bfloat16)
    rotary = type(model.model.rotary_emb)
    model = model.to_empty(device="cuda").eval()
    model.model.rotary_emb = rotary(model.config).to("cuda")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return model


def random_pool(model: LlamaForCausalLM, batches: list[int]) -> KVPool:
    pages = PREFIX // PAGE + max(batches) * -(-SUFFIX // PAGE)
    pool = KVPool(kv_spec(model), pages, PAGE)
    for layer in range(pool.spec.num_layers):
        for kv in (pool.k(layer), pool.v(layer)):
            kv.normal_()
    return pool


def step_of(batch: int, planner: Planner) -> Step:
    work = workload(f"2L b{batch} p{PREFIX} s{SUFFIX}", 32, 8)
    tokens = np.random.default_rng(batch).integers(0, LLAMA_8B["vocab_size"], batch)
    return build_step(work.snapshot, work.queries, tokens, np.arange(batch), planner, "cuda")


@contextmanager
def without_attention() -> Iterator[None]:
    """Calls of tree_attention return memory as it is; all else, appending included, stays."""
    real = ops.ops_for

    def returns_at_once(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    def stub(device: torch.device) -> backend.Ops:
        return dataclasses.replace(real(device), tree_attention=returns_at_once)

    ops.ops_for = stub  # type: ignore[assignment]
    try:
        yield
    finally:
        ops.ops_for = real


def step_ms(runner: ModelRunner, step: Step, replays: int) -> dict[str, float]:
    """Median and spread of replays of one captured step."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            runner(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        runner(step)
    times = []
    for _ in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    return {"ms": statistics.median(times[3:]), "least_ms": min(times[3:]), "most_ms": max(times[3:])}


def measure(model: LlamaForCausalLM, batches: list[int], replays: int) -> list[dict[str, Any]]:
    pool = random_pool(model, batches)
    spec = pool.spec
    planner = planner_for(HeadShape(32, spec.kv_heads, spec.head_dim, 2), spec.device, spec.dtype)
    eager, compiled = ModelRunner(model, pool), ModelRunner(model, pool, compiled=True)
    assert compiled.compiled is not None
    rows: list[dict[str, Any]] = []
    for batch in batches:
        step = step_of(batch, planner)
        for name, runner in (("eager", eager), ("compiled", compiled)):
            graphs, seconds, began = compiled.compiled.graphs, compiled.compiled.seconds, time.perf_counter()
            runner(step)
            torch.cuda.synchronize()
            row: dict[str, Any] = {"batch": batch, "modules": name, "first_step_s": time.perf_counter() - began}
            if name == "compiled":
                row["graphs"] = compiled.compiled.graphs - graphs
                row["compile_s"] = compiled.compiled.seconds - seconds
                row["fallback"] = compiled.compiled.reason
            row["attention"] = True
            rows.append({**row, **step_ms(runner, step, replays)})
            with without_attention():
                rows.append({**row, "attention": False, **step_ms(runner, step, replays)})
            for done in rows[-2:]:
                with_attention = "with" if done["attention"] else "without"
                print(f"batch {batch:5d}  {name:9s} {with_attention:8s} attention {done['ms']:7.2f} ms", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    began = time.perf_counter()
    model = prefixkit.patch(random_model(options.layers))
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "layers": options.layers,
        "rows": measure(model, options.batches, options.replays),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    result["seconds"] = time.perf_counter() - began
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
