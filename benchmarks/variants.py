"""Variants of attention on one GPU, against causal attention, compiled FlexAttention and a float64 reference.

    python -m benchmarks.variants [--parts plain,trees,errors] [--variants NAMES] [--seconds 220] [--out FILE]
    python -m benchmarks.variants --tiny --device cpu       all of it in seconds, as a test; times mean nothing

bfloat16, 32 query heads over 8 KV heads of size 128, pages of 16 tokens.  Microseconds of captured graphs over input
sets larger than the L2, contenders in turns, medians.  Plans, block classes and FlexAttention's block masks are made
before the timing.  A fresh folder replaces all caches of compiled kernels, so first uses compile.

``plain``: a prompt of 16,384 tokens, all of them queries, and a decode step of 16 sequences of 1,024.  ``trees``: a
decode step over 64 leaves of 128 tokens below 2,048 shared ones, over a binary tree (``beam d6``) and over a comb of
512 leaves, and all tokens of 16 prompts of 1,024 below 4,096 shared ones.  Columns of a row:

``us``              ours; ``base``, ours without the variant (causal; without a mask for natten); flex: FlexAttention's
                    Triton backend; flex_flash: its FLASH backend; flashinfer; a text says why a contender did not run;
                    ``absent`` of the whole run names contenders that are not installed
``over_base``       ours over base
``over_flex``       ours over FlexAttention's faster backend: below 1, ours is faster
``difference``      between ours and FlexAttention, relative to the norm
``blocks``          of prompts: shares of blocks with visible scores, for the size of our tiles (128 rows by 64 keys)
                    and of FlexAttention's (128 by 128)
``over_blocks``     over_base divided by ours and base's share: 1, time is proportional to visible blocks
``kv_tokens``       tokens whose K and V the plan reads, ours over base, for variants with a known window
``over_kv``         over_base divided by that: 1, time is proportional to the tokens read
``classify_us``     classifying the blocks of a plan under a mask, once for all layers and not part of ``us``; null if
                    there are no blocks to classify
``plan_ms``, ``mask_ms``   our plan; FlexAttention's block mask
``first_use_s``     the first call: ours compiles a variant in its first workload only, FlexAttention in each
``compilations``    kernels or graphs made: ``ours`` and ``flex`` at first use; ``ours, new numbers``: other sizes,
                    slopes, documents; ``ours, new shape``, of plain batches: shorter sequences; of decode steps
                    ``flex, new numbers`` and ``flex, new shape`` (one sequence less)
``above``           figures above what is allowed, ``[figure, limit]`` (``tree_attention/variant_limits.py``)

``errors``: root mean square errors against float64 of the variants of the FlexAttention paper (Dong et al. 2024), of
one prompt of 1,024 tokens: ``rmse`` of outputs, ``lse_rmse`` of log-sum-exps; ``over_best``: ours over the better of
FlexAttention and torch's flash attention, which has no other variant than causal or none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.runner import OUT_OF_TIME, Row, Run, arguments, clocks, failure, free_memory, in_turns
from benchmarks.tree_attention.rivals import Unfit
from benchmarks.tree_attention.variant_cases import PAPER, Mods, Numbers, causal, mods_of, visible_blocks
from benchmarks.tree_attention.variant_errors import error_row
from benchmarks.tree_attention.variant_inputs import (
    Attend,
    Clock,
    Flex,
    HostClock,
    Inputs,
    Ours,
    Plain,
    absent,
    compiled_kernels,
    flashinfer,
    flex_anew,
    flex_graphs,
    make,
    wait,
)
from benchmarks.tree_attention.variant_limits import above_errors, above_limits, limits_of
from benchmarks.tree_attention.variant_sizes import FULL, TINY, Sizes
from prefixkit.attention.variants import Variant
from prefixkit.testing.named_trees import leaf_queries, prompts, tree_of

PARTS = ["plain", "trees", "errors"]
NAMES = list(mods_of(Numbers(), 1, 64, "cpu"))
# Variants for which FlexAttention's compilations for other numbers are counted: one captures a number, one a tensor.
COUNTED = ("window", "document")
TURNS = 2


@dataclass(frozen=True)
class Setting:
    """The device and the sizes."""

    sizes: Sizes
    device: str
    dtype: torch.dtype
    absent: dict[str, str]

    def mods(self, positions: int, other: bool = False) -> dict[str, Mods]:
        numbers = self.sizes.other if other else self.sizes.numbers
        return mods_of(numbers, self.sizes.heads.query, positions, self.device)

    def inputs(self, tree: Any, plain: Plain | None = None) -> Inputs:
        return make(tree, self.sizes.heads, self.dtype, self.device, plain)

    def clock(self, attend: Attend, sets: int) -> Callable[[], float]:
        return Clock(attend, sets) if self.device == "cuda" else HostClock(attend)

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of one call, with the device's part, and its result."""
        wait(torch.device(self.device))
        began = time.perf_counter()
        found = call()
        wait(torch.device(self.device))
        return round(time.perf_counter() - began, 3), found


class Bench:
    """All variants over one step: clocks of the bases are set up once."""

    def __init__(self, setting: Setting, inputs: Inputs) -> None:
        self.setting, self.inputs = setting, inputs
        positions = int(inputs.tree.positions.max()) + 1
        self.mods, self.other = (setting.mods(positions, other) for other in (False, True))
        self._bases: dict[str, tuple[Ours, Callable[[], float]]] = {}

    def base(self, name: str) -> tuple[Ours, Callable[[], float]]:
        """Time of ours without a variant: causal, or without a mask."""
        if name not in self._bases:
            ours = Ours(self.inputs, self.mods[name].variant(name))
            ours.classify()
            self._bases[name] = ours, self.setting.clock(ours.attend, len(self.inputs.q))
        return self._bases[name]

    def row(self, name: str) -> Row:
        """A variant's row, without its workload."""
        mods, sets, counts = self.mods[name], len(self.inputs.q), dict[str, int | str]()
        ours = Ours(self.inputs, mods.variant(name))
        before = compiled_kernels()
        first, (out, _) = self.setting.seconds(ours.first)
        counts["ours"] = compiled_kernels() - before
        row: Row = {"us": {}, "plan_ms": round(ours.plan_ms, 2), "first_use_s": {"ours": first}}
        base, clock = self.base(mods.base)
        contenders = {"base": clock, "ours": self.setting.clock(ours.attend, sets)}
        if self.inputs.plain is not None:
            self._rivals(name, out, row, contenders, counts)
        times = in_turns(contenders, TURNS)
        row["us"] = {who: round(statistics.median(each), 2) for who, each in times.items()} | row["us"]
        row |= {"classify_us": self._classify_us(ours), **self._shares(mods, ours, base, row["us"])}
        counts["ours, new numbers"] = self._compiled_again(self.inputs, self.other[name].variant(name))
        if self.shorter is not None:
            counts["ours, new shape"] = self._compiled_again(self.shorter, mods.variant(name))
        row |= {"compilations": counts, "sm_mhz": clocks().get("sm_mhz")}
        is_prompt = self.inputs.queries.num_rows > len(self.inputs.queries.node)
        limits = limits_of(name, is_prompt, bool(ours.variant.visible.limits))
        return row | {"above": above_limits(row, limits)}

    @cached_property
    def shorter(self) -> Inputs | None:
        """The batch with half of each sequence."""
        plain = self.inputs.plain
        if plain is None:
            return None
        half = Plain(plain.count, plain.length // 2, -(-plain.queries // 2))
        return self.setting.inputs(half.tree(), half)

    def _rivals(
        self, name: str, out: Tensor, row: Row, contenders: dict[str, Callable[[], float]], counts: dict[str, Any]
    ) -> None:
        """Add the other contenders that run here to ``contenders``, and facts about them to ``row`` and ``counts``."""
        inputs, mods = self.inputs, self.mods[name]
        expected = inputs.by_sequence(out).float()
        flex_anew()
        for who, backend in (("flex", None), ("flex_flash", "FLASH")):
            if who in self.setting.absent:
                continue
            try:
                flex = Flex(inputs, backend)
                flex.use(mods)
                before = flex_graphs()
                row["first_use_s"][who], found = self.setting.seconds(partial(flex.attend, 0))
                counts[who] = flex_graphs() - before
                if who == "flex":
                    row["mask_ms"] = round(flex.mask_ms, 2)
                    row["difference"] = round(float((found.float() - expected).norm() / found.float().norm()), 5)
                contenders[who] = self.setting.clock(flex.attend, len(inputs.q))
                if who == "flex" and name in COUNTED and inputs.plain and inputs.plain.queries == 1:
                    counts |= self._flex_again(flex, name)
            except Exception as error:
                row["us"][who] = failure(error)
        if "flashinfer" in self.setting.absent:
            return
        try:
            run = flashinfer(inputs, name, self.setting.sizes.numbers)
            run(0)
            contenders["flashinfer"] = self.setting.clock(run, len(inputs.q))
        except Unfit as error:
            row["us"]["flashinfer"] = str(error)
        except Exception as error:
            row["us"]["flashinfer"] = failure(error)

    def _flex_again(self, flex: Flex, name: str) -> dict[str, int]:
        """Graphs that FlexAttention compiles for a shape and numbers that it has not seen."""
        counts, before = dict[str, int](), flex_graphs()
        assert self.inputs.plain is not None, "it is a plain batch"
        flex.attend(0, self.inputs.plain.count - 1)
        counts["flex, new shape"], before = flex_graphs() - before, flex_graphs()
        kept = flex.score_mod, flex.block_mask  # a graph that was captured reads the mask
        flex.use(self.other[name])
        flex.attend(0)
        flex.score_mod, flex.block_mask = kept
        return counts | {"flex, new numbers": flex_graphs() - before}

    def _compiled_again(self, inputs: Inputs, variant: Variant) -> int:
        """Kernels of ours for other numbers in the same functions, or for another step."""
        ours, before = Ours(inputs, variant), compiled_kernels()
        ours.first()
        wait(self.inputs.device)
        return compiled_kernels() - before

    def _classify_us(self, ours: Ours) -> float | None:
        if not ours.classes().numel():
            return None
        return round(self.setting.clock(lambda _: ours.classes(), 1)(), 2)

    def _shares(self, mods: Mods, ours: Ours, base: Ours, us: dict[str, Any]) -> Row:
        """Ratios of times, of blocks and of tokens."""
        row: Row = {"over_base": round(us["ours"] / us["base"], 3)}
        flexes = [us[who] for who in ("flex", "flex_flash") if isinstance(us.get(who), float)]
        if flexes:
            row["over_flex"] = round(us["ours"] / min(flexes), 3)
        plain = self.inputs.plain
        if mods.mask is not None and plain is not None and plain.queries > 1:
            heads = self.inputs.heads
            tile = max(1, 128 * heads.kv // heads.query), 64
            ask = plain.queries, plain.length - plain.queries, plain.length
            shares = {"ours": visible_blocks(mods.mask, *ask, tile, self.setting.device)}
            shares["flex"] = visible_blocks(mods.mask, *ask, (128, 128), self.setting.device)
            shares["base"] = visible_blocks(self.mods[mods.base].mask or causal, *ask, tile, self.setting.device)
            row["blocks"] = {who: round(share, 4) for who, share in shares.items()}
            row["over_blocks"] = round(row["over_base"] * shares["base"] / shares["ours"], 3)
        if ours.variant.visible.limits:
            row["kv_tokens"] = round(ours.kv_tokens() / base.kv_tokens(), 4)
            row["over_kv"] = round(row["over_base"] / row["kv_tokens"], 3)
        return row


def measure(run: Run, bench: Bench, workload: str, names: list[str]) -> None:
    """A row for each variant of a workload; an error of one is its row."""
    for name in names:
        row: Row = {"workload": workload, "variant": name}
        try:
            row |= {"skipped": OUT_OF_TIME} if run.left <= 0 else bench.row(name)
        except Exception as error:
            row["skipped"] = failure(error)
        run.add("times", row, line(row))
        free_memory()


def line(row: Row) -> str:
    """A row in a line of text."""
    text = f"{row['workload']}, {row['variant']}: "
    if "skipped" in row:
        return text + str(row["skipped"])
    named = ("over_base", "over_flex", "over_blocks", "over_kv", "classify_us", "difference", "above")
    cells = [f"{name} {row[name]}" for name in named if row.get(name) not in (None, {})]
    counts = ", ".join(f"{who} {count}" for who, count in row["compilations"].items() if count)
    times = ", ".join(f"{who} {us}" for who, us in row["us"].items())
    first = ", ".join(f"{who} {seconds}" for who, seconds in row["first_use_s"].items() if seconds > 0.1)
    return text + f"{times} us; {', '.join(cells)}; first use s: {first or '0'}; compiled: {counts or '0'}"


def plain(run: Run, setting: Setting, names: list[str]) -> None:
    for workload, batch in setting.sizes.plain.items():
        bench = Bench(setting, setting.inputs(batch.tree(), batch))
        # All tokens of a prompt are points of the grid; a decode step has one query, which sees all.
        whole = batch.queries == batch.length == setting.sizes.numbers.grid**2
        measure(run, bench, workload, names if whole else _of_any_length(names))


def trees(run: Run, setting: Setting, names: list[str]) -> None:
    tokens, count, shared = setting.sizes.tree_prompts
    workloads = {name: (snapshot := tree_of(name), leaf_queries(snapshot)) for name in setting.sizes.trees}
    whole = prompts(tokens, tokens, count, shared, prefix_computed=False)
    workloads[f"{count} x {tokens} after {shared}"] = whole
    for workload, tree in workloads.items():
        measure(run, Bench(setting, setting.inputs(tree)), workload, _of_any_length(names))


def _of_any_length(names: list[str]) -> list[str]:
    return [name for name in names if name != "noop" and not name.startswith("natten")]


def errors(run: Run, setting: Setting, names: list[str]) -> None:
    """A row for each of the paper's variants."""
    tokens = setting.sizes.errors
    batch = Plain(1, tokens, tokens)
    inputs = setting.inputs(batch.tree(), batch)
    sizes: Row = {"window": tokens // 4, "prefix": tokens // 4, "documents": 5, "grid": round(tokens**0.5)}
    numbers = replace(setting.sizes.numbers, **sizes)
    for name, mods in mods_of(numbers, inputs.heads.query, tokens, setting.device).items():
        if name in PAPER and name in names:
            row: Row = {"variant": name, "tokens": tokens}
            try:
                row |= {"skipped": OUT_OF_TIME} if run.left <= 0 else error_row(name, mods, inputs)
                row["above"] = above_errors(row)
            except Exception as error:
                row["skipped"] = failure(error)
            run.add("errors", row)
    free_memory()


def main(given: list[str] | None = None) -> None:
    device: Row = {"choices": ["cuda", "cpu"], "default": "cuda"}
    options = arguments(__doc__, given, parts=PARTS, variants=NAMES, seconds=220.0, seed=0, tiny=False, device=device)
    on_gpu = options.device == "cuda"
    sizes, dtype = TINY if options.tiny else FULL, torch.bfloat16 if on_gpu else torch.float32
    setting = Setting(sizes, options.device, dtype, absent())
    caches = ("PREFIXKIT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as fresh:
        folders = {name: os.path.join(fresh, name.lower()) for name in caches}
        with patch.dict(os.environ, folders), torch.no_grad():
            measure_all(options, setting)


def measure_all(options: argparse.Namespace, setting: Setting) -> None:
    """Every part that the options name."""
    run = Run(options, options.device)
    run.result |= {"seed": options.seed, "absent": setting.absent}
    torch.manual_seed(options.seed)
    parts = {"plain": plain, "trees": trees, "errors": errors}
    for part in options.parts:
        parts[part](run, setting, options.variants)
    rows = (row for part in ("times", "errors") for row in run.result.get(part, []))
    run.result["above"] = sum(len(row.get("above", {})) for row in rows)
    run.finish("machine", "absent", "above", "seconds")


if __name__ == "__main__":
    main()
