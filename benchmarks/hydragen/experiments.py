"""What each row of ``jobs.toml`` measures: functions of a :class:`Rig` and the row's numbers."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cpu_sampling import prefill_once
from benchmarks.hydragen.methods import METHODS, Case, Core, Parts
from benchmarks.runner import Row, captured, failure, free_memory, input_sets, replay_us, replayed_ms, wall_seconds
from benchmarks.shapes import Shape
from benchmarks.tree_attention.inputs import planner_for
from benchmarks.tree_attention.rivals import MOST_DIFFERENCE, MOST_EXPANDED_BYTES
from prefixkit.attention.planner import Planner
from prefixkit.attention.sharing import CostModel
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.engine.request import Request
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.kv_pool import KVSpec
from prefixkit.models import ModelRunner, patch
from prefixkit.models.compile.layers import compile_layer
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine

CHECKED, CHECKED_AT = Case(((1, 200), (4, 37)), batch=16, new=24, private=5), 11
RESERVE_BYTES, CPU_BYTES = 12e9, 1 << 24  # left for activations, logits, graphs and libraries; KV on a CPU
SMALLER_FLASH, QUESTION_TOKENS, STOCK_STEPS = "flash, fewer at a time", 14, 12


class Rig:
    """One model on one device, and ``capacity`` bytes for KV, else what the model leaves free."""

    def __init__(self, shape: Shape, device: torch.device, capacity: int | None = None) -> None:
        self.shape, self.device, self.on_gpu = shape, device, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.model = patch(shape.build(device, self.dtype), tree_cache="never")  # `generate` is stock here
        free_memory()
        free = torch.cuda.mem_get_info(device)[0] - RESERVE_BYTES if self.on_gpu else CPU_BYTES
        self.capacity = free if capacity is None else capacity
        self.differ: dict[str, float | str] = {}  # see `differences`
        self._known: dict[tuple[str, Case | int], Row] = {}

    def planner(self, shares: bool = True) -> Planner:
        planner = planner_for(self.shape.heads, self.shape.kv_heads, self.shape.head_dim, self.device, self.dtype)
        if not shares:  # by this cost nothing is worth sharing; only the host plans with it
            planner.cost = CostModel(item=1e30, kv_byte=0.0, partial_byte=0.0, tile_heads=planner.cost.tile_heads)
            if isinstance(planner, CudaPlanner):
                planner.launch, planner.gpu = None, replace(planner.gpu, sharing=planner.cost)
        return planner

    def spec(self, layers: int | None = None) -> KVSpec:
        return KVSpec(layers or self.shape.layers, self.shape.kv_heads, self.shape.head_dim, self.dtype, self.device)

    def core(self, method: str, case: Case, layers: int | None = None) -> Core:
        return METHODS[method](case, self.spec(layers), self.shape.heads)

    def refused(self, method: str, case: Case) -> str | None:
        """Why a method is not measured."""
        if isinstance(by := self.differ.get(method, 0.0), str) or not by < MOST_DIFFERENCE:
            return by if isinstance(by, str) else f"differs from ours by {by} of the norm"
        needed = METHODS[method].tokens_held(case) * self.spec().bytes_per_token
        room = f"KV of {needed / 1e9:.1f} GB, capacity {self.capacity / 1e9:.1f} GB"
        return f"does not fit: {room}" if needed > self.capacity else None

    def attempt(self, run: Callable[[], Row]) -> Row:
        """What a run without gradients returns, or why it does not."""
        try:
            with torch.no_grad():
                return run()
        except Exception as error:
            return {"skipped": failure(error)}
        finally:
            if self.on_gpu:
                free_memory()

    def measure(self, name: str, case: Case) -> Row:
        """Milliseconds of a method's step at three lengths and tokens per second, or why there are none; once.

        ``METHOD, compiled``: the layers through torch.compile.  Steps without attention differ by their batch alone.
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

    def tokens(self, count: int, seed: int) -> np.ndarray:
        """``[count]`` random token ids."""
        return np.random.default_rng(seed).integers(0, self.shape.vocab, count).astype(np.int32)

    def engine(self, prompts: list[np.ndarray], n: int, new: int, compiled: bool = False) -> Row:
        """Sample ``n`` continuations of each prompt to their full length; ``compiled``: in a second run."""
        params = SamplingParams(n=n, temperature=1.0, max_new_tokens=new, seed=1)
        requests = [Request(index, prompt, params) for index, prompt in enumerate(prompts)]
        budget = int(torch.cuda.mem_get_info(self.device)[0] * 0.85) if self.on_gpu else None  # of what is free
        engine = make_engine(self.model, requests, kv_budget=budget, compiled=compiled)
        if compiled:
            engine.run(requests)
            engine.report = Report()
        engine.run(requests)
        row: Row = {name: getattr(engine.report, name) for name in ("new_tokens", "steps")}
        row |= {"seconds": round(engine.report.seconds, 4)}
        return row | {"tokens_per_s": round(engine.report.new_tokens / engine.report.seconds, 1)}


def as_traced(graph: Any, inputs: Any) -> Any:
    """In the place of a compiler, on a CPU."""
    return compile_layer(graph, inputs, lambda graph, inputs: graph)


def differences(rig: Rig) -> dict[str, float | str]:
    """For each method with parts: the norm of its difference from ours over the norm of ours; or why there is none."""
    print("seed 7")
    torch.manual_seed(7)
    tree, step = rig.core("ours", CHECKED, 1), CHECKED.step(CHECKED_AT, rig.planner(), rig.device)
    heads = rig.shape.heads, rig.shape.kv_heads, rig.shape.kv_heads
    q, *kv = (torch.randn(CHECKED.batch, n, rig.shape.head_dim).to(rig.device, rig.dtype) for n in heads)
    snapshot, node, slots = step.planned.tree.snapshot, step.planned.tree.queries.node, []
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


def steps(rig: Rig, case: Case, *names: str) -> Row:
    """A case with every method, ``NAME, compiled`` too."""
    row = {"kind": "step", "case": asdict(case), "floor_ms": round(case.mean(partial(case.floor_ms, rig.shape)), 4)}
    return row | {"methods": {name: rig.measure(name, case) for name in names}}


def throughput(rig: Rig, batch: int, prefix: int, new: int) -> Row:
    """Where flash does not fit, also what it reaches at the largest batch that does, a power of two below."""
    case, plain = Case(((1, prefix),), batch, new), ("none", "flash", "hydragen", "ours")
    row = steps(rig, case, *plain, "none, compiled", "ours, compiled", "hydragen, compiled")
    if "step_ms" not in row["methods"]["flash"]:
        while batch > 1 and rig.refused("flash", replace(case, batch=batch)):
            batch //= 2
        row["methods"][SMALLER_FLASH] = rig.measure("flash", replace(case, batch=batch)) | {"batch": batch}
    return row


def grid(rig: Rig, suffix: int, batches: list[int], prefixes: list[int]) -> Row:
    """One layer's attention, with the shape's heads."""
    one, points = replace(rig.shape, layers=1), []
    for batch, prefix in ((batch, prefix) for prefix in prefixes for batch in batches):
        case = Case(((1, prefix),), batch, suffix)
        point: Row = {name: _layer_us(rig, name, case) for name in ("flash", "hydragen", "ours")}
        points.append(point | {"batch": batch, "prefix": prefix, "floor_us": 1e3 * case.floor_ms(one, suffix)})
    return {"kind": "grid", "suffix": suffix, "heads": [one.heads, one.kv_heads], "points": points}


def _layer_us(rig: Rig, method: str, case: Case) -> float | str:
    """Microseconds of one layer.  Where KV held by each sequence is too large, fewer sequences, and scaled."""
    bytes_held = METHODS[method].tokens_held(case) * rig.spec(1).bytes_per_token
    if method == "flash" and bytes_held > MOST_EXPANDED_BYTES and case.batch > 1:
        smaller = _layer_us(rig, method, replace(case, batch=case.batch // 2))
        return smaller if isinstance(smaller, str) else round(smaller * case.batch / (case.batch // 2), 2)
    sets, heads = input_sets(bytes_held) if rig.on_gpu else 1, (rig.shape.heads, rig.shape.head_dim)

    def timed() -> Row:
        """Calls rotate through layers, so that none finds its KV in the L2."""
        core, q = rig.core(method, case, sets), torch.randn(sets, case.batch, *heads).to(rig.device, rig.dtype)
        core.at(case.step(case.new, rig.planner(), rig.device))
        if rig.on_gpu:
            return {"us": replay_us(lambda index: core.attend(index, q[index]), sets, repeats=5)}
        return {"us": 1e6 * wall_seconds(lambda: core.attend(0, q[0]), warm=1)[0]}

    why = rig.refused(method, replace(case, batch=1))
    return why or (found := rig.attempt(timed)).get("skipped") or round(found["us"], 2)


def document(rig: Rig, count: int, length: int, new: int) -> Row:
    """Random tokens stand for the words: times do not depend on them."""
    text = rig.tokens(length, seed=11)
    whole = [np.concatenate((text, rig.tokens(QUESTION_TOKENS, seed=1000 + index))) for index in range(count)]
    row = steps(rig, Case(((1, length),), count, new, QUESTION_TOKENS), "none", "flash", "hydragen", "ours")
    rig.engine([prompt[-64:] for prompt in whole], n=1, new=2)
    row["prefill_s"] = rig.engine([text], n=1, new=1)["seconds"]
    return row | {"engine": rig.engine(whole, n=1, new=new), "question_tokens": QUESTION_TOKENS}


def problems(rig: Rig, problems: int, samples: int, shots: int, tokens: int, new: int) -> Row:
    case = Case(((1, shots), (problems, tokens)), problems * samples, new)
    return steps(rig, case, "none", "flash", "hydragen", "hydragen, two levels", "ours")


def samples(rig: Rig, n: int, requests: int, prompt: int, new: int) -> Row:
    names = "none", "ours, sharing", "ours, not sharing", "hydragen"
    return {"n": n} | steps(rig, Case(((requests, prompt),), requests * n, new), *names)


def engine(rig: Rig, n: int, prompt: int, new: int, requests: int = 1) -> Row:
    """Whole runs, as they are and compiled; a step is what more tokens take a run than one that samples a few."""
    prompts, few = [rig.tokens(prompt, seed=prompt + index) for index in range(requests)], max(new // 4, 2)
    _, first, short, long = (rig.engine(prompts, n, count) for count in (2, 1, few, new))  # the first warms up
    compiled = rig.engine(prompts, n, new, compiled=True) if rig.on_gpu else None
    step_ms = round((long["seconds"] - short["seconds"]) / (new - few) * 1e3, 3)
    row = {"kind": "engine", "n": n, "case": {"batch": n * requests, "prefix": prompt, "new": new}, "ours": long}
    return row | {"compiled": compiled, "prefill_s": first["seconds"], "step_ms": step_ms}


def stock(rig: Rig, what: str, batch: int, prompt: int) -> Row:
    """A step of stock transformers: what more of them take than a run that samples one token, over their number."""
    ids = torch.from_numpy(rig.tokens(prompt, seed=3)).long().to(rig.device)[None]
    rows = {"input_ids": ids.expand(batch, -1), "attention_mask": torch.ones_like(ids.expand(batch, -1))}

    def generate(new: int) -> object:
        ends = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, "eos_token_id": None}
        return rig.model.generate(**rows, **ends, do_sample=True)

    def expand(new: int) -> object:
        steps = prefill_once(rig.model, ids, batch, lambda logits: torch.multinomial(logits.float().softmax(-1), 1))
        return list(islice(steps, new))

    run, name = {"generate": (generate, "model.generate"), "expand": (expand, "prefill once, expand")}[what]
    wait = torch.cuda.synchronize if rig.on_gpu else lambda: None
    with torch.inference_mode():
        counts = (2, 1, 1 + STOCK_STEPS)  # the first warms up
        _, short, long = (wall_seconds(partial(run, new), wait=wait)[0] for new in counts)
    step = (long - short) / STOCK_STEPS
    row = {"kind": "stock", "what": name, "case": {"batch": batch, "prefix": prompt, "steps": STOCK_STEPS}}
    return row | {"step_ms": round(step * 1e3, 3), "tokens_per_s": round(batch / step, 1), "prefill_s": round(short, 4)}
