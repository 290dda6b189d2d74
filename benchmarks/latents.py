"""Attention over latents (MLA, DeepSeek-V3's heads) on one GPU: absorbed, expanded once, expanded at every step.

    python -m benchmarks.latents [--rows 1,4,16,64,256,1024] [--shared 4096] [--own 128] [--calls] [--out FILE]

Microseconds of one layer's attention in a decode step: the products that absorb queries and compute outputs from means
of latents, the kernels, the merge.  *absorbed*: all rows read shared nodes as latents; *kept*: the shared nodes' K and
V are computed once and kept; *made*: they are computed at every step; *chosen*: the cost model's choice.  Medians of
captured graphs over three layers in turns, so that reads come from memory.  ``floor``: absorbed flops at 790 TFLOP/s.

``--calls``: seconds of whole calls of a model with four such layers, against ``model.generate()``.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import prefixkit
import prefixkit.backends
from benchmarks.hybrids import on_tree, stock, timed
from benchmarks.runner import Replay, Row, Run, arguments, clocks, free_memory, in_turns
from benchmarks.shapes import LATENTS
from prefixkit.attention.gpu.latent_cost import H200_LATENTS, LatentCost
from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.backends.cuda.latents.latent_kernels import attend
from prefixkit.backends.cuda.latents.latent_planners import planner_for
from prefixkit.models.latents.latent_maps import LatentMaps
from prefixkit.testing.forests import make_snapshot

HEADS, LATENT, ROTARY, OWN_DIM, V_DIM, PAGE, LAYERS = 128, 512, 64, 128, 128, 64, 3
WHOLE = HeadShape(HEADS, HEADS, OWN_DIM + ROTARY, 2, V_DIM)
# With these costs shared nodes are never worth expanding, or always, except for single rows.
NEVER, ALWAYS = LatentCost(part=1e12), LatentCost(absorbed=100 * H200_LATENTS.absorbed)
# Costs, and the assumed number of layers: with very many layers K and V are not kept.
WAYS = {"absorbed": (NEVER, 1), "kept": (ALWAYS, 1), "made": (ALWAYS, 10**6), "chosen": (H200_LATENTS, LAYERS)}


def tree_of(rows: int, shared: int, own: int) -> tuple[StepTree, int]:
    """A node of ``shared`` tokens, below it a leaf of ``own`` tokens for each row; and the number of their pages."""
    lengths = [shared, *[own] * rows]
    snapshot, pages = make_snapshot(np.random.default_rng(0), [-1, *[0] * rows], lengths, PAGE, orderly=True)
    leaf = np.arange(1, rows + 1, dtype=np.int32)
    snapshot.computed[leaf] = snapshot.length[leaf] - 1
    snapshot = replace(snapshot, content=np.arange(rows + 1))  # so that K and V can be kept
    return StepTree(snapshot, Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf])), pages


def attention_row(rows: int, shared: int, own: int) -> Row:
    """Each way for one tree."""
    (tree, pages), device = tree_of(rows, shared, own), torch.device("cuda")
    like: Row = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(rows, HEADS, OWN_DIM + ROTARY, **like)
    positions = torch.from_numpy(tree.positions).to(device)
    layers = []
    for _ in range(LAYERS):
        weight = nn.Parameter(torch.randn(HEADS, OWN_DIM + V_DIM, LATENT, **like) / LATENT**0.5, requires_grad=False)
        made, copied = slice(0, OWN_DIM), slice(OWN_DIM, OWN_DIM + ROTARY)
        maps = LatentMaps(weight[:, :OWN_DIM], weight[:, OWN_DIM:], made, copied)
        layers.append((tuple(torch.randn(pages, PAGE, 1, dim, **like) for dim in (LATENT, ROTARY)), maps))
    scale, runs, found = (OWN_DIM + ROTARY) ** -0.5, dict[str, Callable[[int], Tensor]](), dict[str, Tensor]()
    for way, (cost, count) in WAYS.items():
        parts = (LatentPart(part, WHOLE, LATENT, ROTARY) for part in (Part.EXPANDED, Part.ABSORBED))
        planners = [planner_for(part, device, torch.bfloat16, count, cost) for part in parts]
        plans: list[StepPlan] = [planner.plan(tree, device)[0] for planner in planners]

        def run(layer: int, plans: list[StepPlan] = plans) -> Tensor:
            of_layer, maps = layers[layer]
            return attend(q, of_layer, maps, positions, (plans[0], plans[1]), scale)

        runs[way], found[way] = run, run(0)
    worst = max(float((out - found["absorbed"]).abs().max()) for out in found.values())
    times = in_turns({way: Replay(run, LAYERS).us for way, run in runs.items()}, turns=3)
    us = {way: round(statistics.median(each), 1) for way, each in times.items()}
    flops = rows * (shared + own) * HEADS * 2 * (2 * LATENT + ROTARY)
    row: Row = {"rows": rows, "shared": shared, "own": own, "us": us, "floor_us": round(flops / 790e6, 1)}
    return (
        row
        | {"kept": round(us["absorbed"] / us["kept"], 2), "made": round(us["absorbed"] / us["made"], 2)}
        | {
            "worst_difference": worst,
            "sm_mhz": clocks().get("sm_mhz"),
        }
    )


def calls(run: Run, options: argparse.Namespace) -> None:
    """Whole calls of a session, and of transformers."""
    shape, rng = LATENTS["DeepSeek-V3"], np.random.default_rng(0)
    model: Any = shape.build("cuda", torch.bfloat16)

    def prompts(count: int) -> list[list[int]]:
        return rng.integers(10, shape.vocab, (count, options.shared)).tolist()

    for samples in (64, 256):
        if samples == 64:  # stock repeats the prompt's cache, and expands it at every step
            run.add(
                "calls", {"samples": samples, "who": "stock", **timed(stock(model), prompts(2), samples, options.new)}
            )
            free_memory()
        with prefixkit.Session(prefixkit.patch(model)) as session:
            row = timed(on_tree(session), prompts(4), samples, options.new)
            row |= {"kv_bytes_peak": session.report.kv_bytes_held_peak, "graph_steps": session.report.graph_steps}
            run.add("calls", {"samples": samples, "who": "tree", **row})
        prefixkit.unpatch(model)
        free_memory()


def main() -> None:
    rows = [1, 4, 16, 64, 256, 1024]
    options = arguments(__doc__, rows=rows, shared=4096, own=128, new=64, calls=False)
    run = Run(options)
    for number in options.rows:
        run.add("attention", attention_row(number, options.shared, options.own))
        free_memory()
    if options.calls:
        calls(run, options)
    run.finish()


if __name__ == "__main__":
    main()
