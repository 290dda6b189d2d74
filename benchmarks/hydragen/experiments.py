"""Measurements of a row of ``jobs.toml``: a case with each of its methods, by a :class:`Rig`."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.hydragen.methods import METHODS, Case, Core, Parts
from benchmarks.runner import Row, captured, failure, free_memory, replayed_ms, wall_seconds
from benchmarks.shapes import Shape
from benchmarks.tree_attention.inputs import planner_for
from benchmarks.tree_attention.rivals import MOST_DIFFERENCE
from prefixkit.attention.planner import Planner
from prefixkit.attention.sharing import CostModel
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.kv.kv_pool import KVSpec
from prefixkit.models import ModelRunner, patch
from prefixkit.models.compile.layers import compile_layer
from prefixkit.testing.kv_specs import spec_of_alike

CHECKED, CHECKED_AT = Case(((1, 200), (4, 37)), batch=16, new=24, private=5), 11
RESERVE_BYTES, CPU_BYTES = 12e9, 1 << 24  # left for activations, logits, graphs and libraries; KV on a CPU
SMALLER_FLASH, QUESTION_TOKENS = "flash, fewer at a time", 14


class Rig:
    """One model on one device, and ``capacity`` bytes for KV, by default the memory that the model leaves free."""

    def __init__(self, shape: Shape, device: torch.device, capacity: int | None = None) -> None:
        self.shape, self.device, self.on_gpu = shape, device, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.model = patch(shape.build(device, self.dtype))
        free_memory()
        free = torch.cuda.mem_get_info(device)[0] - RESERVE_BYTES if self.on_gpu else CPU_BYTES
        self.capacity = free if capacity is None else capacity
        self.differ: dict[str, float | str] = {}  # see `differences`
        self._known: dict[tuple[str, Case | int], Row] = {}

    def planner(self, shares: bool = True) -> Planner:
        planner = planner_for(self.shape.heads, self.shape.kv_heads, self.shape.head_dim, self.device, self.dtype)
        if not shares:  # with this cost no node is worth sharing; only the host plans with it
            planner.cost = CostModel(item=1e30, kv_byte=0.0, partial_byte=0.0, tile_heads=planner.cost.tile_heads)
            if isinstance(planner, CudaPlanner):
                planner.launch, planner.gpu = None, replace(planner.gpu, sharing=planner.cost)
        return planner

    def spec(self, layers: int | None = None) -> KVSpec:
        of = layers or self.shape.layers, self.shape.kv_heads, self.shape.head_dim
        return spec_of_alike(*of, self.dtype, self.device)

    def core(self, method: str, case: Case, layers: int | None = None) -> Core:
        return METHODS[method](case, self.spec(layers), self.shape.heads)

    def refused(self, method: str, case: Case) -> str | None:
        """The reason not to measure a method."""
        if isinstance(by := self.differ.get(method, 0.0), str) or not by < MOST_DIFFERENCE:
            return by if isinstance(by, str) else f"differs from ours by {by} of the norm"
        needed = METHODS[method].tokens_held(case) * self.spec().bytes_per_token
        room = f"KV of {needed / 1e9:.1f} GB, capacity {self.capacity / 1e9:.1f} GB"
        return f"does not fit: {room}" if needed > self.capacity else None

    def attempt(self, run: Callable[[], Row]) -> Row:
        """The result of a run without gradients, or the reason why there is none."""
        try:
            with torch.no_grad():
                return run()
        except Exception as error:
            return {"skipped": failure(error)}
        finally:
            if self.on_gpu:
                free_memory()

    def measure(self, name: str, case: Case) -> Row:
        """Milliseconds of a method's step at three lengths and tokens per second, or why there are none; measured once.

        ``METHOD, compiled``: the layers through torch.compile.  Steps without attention depend only on their batch.
        """
        method, key = name.removesuffix(", compiled"), (name, case.batch if name.startswith("none") else case)
        times: dict[int, float] = {}

        def timed() -> Row:
            core, planner = self.core(method, case), self.planner(METHODS[method].shares)
            run = self.step(core, name != method)

            def ms(new: int) -> float:
                """The median of as many as take about 400 ms, 5 to 10."""
                core.at(case.step(new, planner, self.device))
                with core.installed():
                    graph = captured(run) if self.on_gpu else None
                    each = partial(replayed_ms, graph) if graph else lambda n: [1e3 * s for s in wall_seconds(run, n)]
                    times[new] = float(np.median(each(max(5, min(10, int(400.0 / max(each(1)[0], 1e-3)))))))
                return times[new]

            step_ms = ms(1) if method == "none" else case.mean(ms)
            rates = {"step_ms": round(step_ms, 4), "tokens_per_s": round(case.batch / step_ms * 1e3, 1)}
            return {"ms": {str(new): round(took, 4) for new, took in times.items()}, **rates, "chosen": core.chosen}

        why = self.refused(method, case)
        if key not in self._known:
            self._known[key] = {"skipped": why} if why else self.attempt(timed)
        return dict(self._known[key])

    def step(self, core: Core, compiled: bool = False) -> Callable[[], Tensor]:
        """A step in the patched model, whose likeliest tokens are the next one's."""
        runner = ModelRunner(self.model, core.pool, compiled, None if self.on_gpu else as_traced)
        return lambda: core.now.tokens.copy_(runner.compute(core.now).argmax(-1))


def as_traced(graph: Any, inputs: Any) -> Any:
    """A replacement for a compiler, on a CPU."""
    return compile_layer(graph, inputs, lambda graph, inputs: graph)


def differences(rig: Rig) -> dict[str, float | str]:
    """For each method with parts: the norm of its difference from ours over the norm of ours; or why there is none."""
    print("seed", torch.manual_seed(7).initial_seed())
    tree, step = rig.core("ours", CHECKED, 1), CHECKED.step(CHECKED_AT, rig.planner(), rig.device)
    heads = rig.shape.heads, rig.shape.kv_heads, rig.shape.kv_heads
    q, *kv = (torch.randn(CHECKED.batch, n, rig.shape.head_dim).to(rig.device, rig.dtype) for n in heads)
    snapshot, node, slots = step.plans[0].tree.snapshot, step.plans[0].tree.queries.node, []
    while node[0] >= 0:  # from the leaves of all sequences to the root
        slots.insert(0, snapshot.slots(node[:, None], np.arange(snapshot.length[node[0]])[None]))
        node = snapshot.parent[node]
    whole = [pages.flatten(0, 1)[torch.from_numpy(np.concatenate(slots, 1)).to(rig.device)] for pages in tree.layers[0]]

    def answer(core: Core) -> Tensor:
        core.at(step)
        with core.installed():
            torch.ops.prefixkit.kv_append(*kv, *core.layers[0], step.slots)
        return core.attend(0, q).float()

    def difference(name: str) -> Row:
        core: Any = rig.core(name, CHECKED, 1)
        core.fill(whole)
        return {"by": round(float((answer(core) - ours).norm() / ours.norm()), 6)}

    ours, parts = answer(tree), [name for name, kind in METHODS.items() if issubclass(kind, Parts)]
    found = {name: rig.attempt(partial(difference, name)) for name in parts}
    rig.differ = {name: by.get("by", by.get("skipped")) for name, by in found.items()}
    return rig.differ


def steps(rig: Rig, case: Case, names: list[str]) -> Row:
    """A case with every method, ``NAME, compiled`` too.

    If flash does not fit, it is also measured at the largest smaller batch that fits, a power of two.
    """
    row = {"kind": "step", "case": asdict(case), "floor_ms": round(case.mean(partial(case.floor_ms, rig.shape)), 4)}
    methods, batch = {name: rig.measure(name, case) for name in names}, case.batch
    if "skipped" in methods.get("flash", {}):
        while batch > 1 and rig.refused("flash", replace(case, batch=batch)):
            batch //= 2
        methods[SMALLER_FLASH] = rig.measure("flash", replace(case, batch=batch)) | {"batch": batch}
    return row | {"methods": methods}


# By experiment: the case of a row of ``jobs.toml``.
CASES: dict[str, Callable[..., Case]] = {
    "a": lambda batch, prefix, new: Case(((1, prefix),), batch, new),
    "c": lambda questions, document, new: Case(((1, document),), questions, new, QUESTION_TOKENS),
    "d": lambda problems, n, shots, tokens, new: Case(((1, shots), (problems, tokens)), problems * n, new),
    "n": lambda n, requests, prompt, new: Case(((requests, prompt),), requests * n, new),
}
