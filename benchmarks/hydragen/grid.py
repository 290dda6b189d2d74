"""(b) One layer's attention: speed-up over flash without sharing, over batch, prefix and suffix."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.hydragen.arena import DoesNotFit
from benchmarks.hydragen.cases import Case, two_level
from benchmarks.hydragen.jobs import Job, Row
from benchmarks.hydragen.methods import METHODS
from benchmarks.hydragen.step import Rig
from benchmarks.tree_attention.rivals import MOST_EXPANDED_BYTES

LETTER = "b"
METHODS_HERE = ("flash", "hydragen", "ours")
BATCHES, PREFIXES, SUFFIXES = (64, 256, 1024), (1024, 2048, 4096, 8192, 16384), (16, 128, 512)
# Shape: its attention heads are used; batches, prefixes, suffixes.
GRIDS = {
    "CodeLlama-7B": (BATCHES, PREFIXES, SUFFIXES),
    "8/1 heads": (BATCHES, PREFIXES, SUFFIXES),
    "tiny": ((2, 4), (16, 32), (128,)),
}


def jobs(shapes: list[str]) -> list[Job]:
    """A job for each suffix."""
    found = []
    for shape in shapes:
        for suffix in GRIDS.get(shape, ((), (), ()))[2]:
            name = f"grid s{suffix}"
            found.append(Job(LETTER, shape, name, 2 if suffix != 128 else 1, 10.0, partial(_grid, suffix)))
    return found


def _grid(suffix: int, rig: Rig) -> Row:
    batches, prefixes, _ = GRIDS[rig.shape.name]
    one = replace(rig.shape, layers=1)
    points = []
    for prefix in prefixes:
        for batch in batches:
            case = two_level(batch, prefix, suffix)
            points.append(
                {
                    "batch": batch,
                    "prefix": prefix,
                    "floor_us": round(case.floor_ms(one, suffix) * 1e3, 2),
                    **{name: _layer_us(rig, name, case) for name in METHODS_HERE},
                }
            )
    return {"kind": "grid", "suffix": suffix, "heads": [rig.shape.heads, rig.shape.kv_heads], "points": points}


def _layer_us(rig: Rig, method: str, case: Case) -> float | str:
    """Microseconds of one layer.  Where KV held by each sequence is too large, fewer sequences, and scaled."""
    kind, per_layer = METHODS[method], rig.shape.bytes_per_token // rig.shape.layers
    bytes_held = kind.kv_bytes(case, per_layer)
    if method == "flash" and bytes_held > MOST_EXPANDED_BYTES and case.batch > 1:
        fewer = case.batch // 2
        smaller = _layer_us(rig, method, replace(case, batch=fewer))
        return smaller if isinstance(smaller, str) else round(smaller * case.batch / fewer, 2)
    try:
        with torch.no_grad():
            return round(_time(rig, method, case, bytes_held), 2)
    except DoesNotFit as error:
        return str(error)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # a method's failure is a result
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _time(rig: Rig, method: str, case: Case, bytes_held: int) -> float:
    """Calls rotate through layers, so that none finds its KV in the L2."""
    from benchmarks.tree_attention.timing import input_sets, replay_us

    on_gpu = rig.device.type == "cuda"
    sets = input_sets(bytes_held) if on_gpu else 1
    core = rig.core(method, rig.state(case), layers=sets)
    core.at(case.new)
    size = case.batch, rig.shape.heads, rig.shape.head_dim
    q = [torch.randn(size, device=rig.device).to(rig.dtype) for _ in range(sets)]

    def call(index: int) -> torch.Tensor:
        return core.attend(index, q[index], rig.shape.head_dim**-0.5)

    try:
        return replay_us(call, sets, repeats=5) if on_gpu else _wall_us(lambda: call(0))
    finally:
        if on_gpu:
            torch.cuda.empty_cache()


def _wall_us(run: Callable[[], object]) -> float:
    run()
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6
