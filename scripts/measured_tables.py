"""Tables of the measured pages: each function makes one, of a result in benchmarks/results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Table = list[tuple[object, ...]]  # the first line is the head


def seconds(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def attention(data: Any) -> Table:
    found = data["summary"]
    head: Table = [("compared with, on each tree", "trees", "geometric mean", "ahead on", "least")]
    for name in ("best anchor / ours", "best rival / ours"):
        if name in found:
            one = found[name]
            head.append(
                (name.split(" /")[0], one["of"], f"{one['geomean']:.2f}x", one["ahead"], f"{one['least'][1]:.2f}x")
            )
    return head


def prefill(data: Any) -> Table:
    rows = [("heads", "rows", "ours, us", "cuDNN, us", "ours / cuDNN", "time / floor")]
    for row in data["prefill"]:
        cudnn = row["rivals"].get("sdpa_cudnn")
        ratio = f"{row['us'] / cudnn:.2f}" if cudnn else "-"
        shape = f"{row['heads'][0]}/{row['heads'][1]}, {row['prompts']}"
        rows.append(
            (
                shape,
                row["rows"],
                f"{row['us']:.0f}",
                f"{cudnn:.0f}" if cudnn else "-",
                ratio,
                f"{row['us'] / row['floor_us']:.2f}",
            )
        )
    return rows


def whole_calls(data: Any) -> Table:
    vllm = json.loads((ROOT / "benchmarks/anchors/h200_vllm.json").read_text())["seconds"]
    rows: Table = [("shape", "call", "prefixkit, s", "vLLM 0.25.1, s", "vLLM / prefixkit")]
    for case in data["cases"]:
        shape, call = case["name"].split(": ")
        other = statistics.median(vllm[shape][call]) if call in vllm.get(shape, {}) else None
        rows.append(
            (
                shape,
                call,
                seconds(case["new"]),
                seconds(other) if other else "not measured",
                f"{other / case['new']:.2f}x" if other else "",
            )
        )
    return rows


def short_prompts(data: Any) -> Table:
    """Calls for one token, by new tokens of the prompt: by graphs of short steps, and by launching their kernels."""
    rows: Table = [("shape", "layers", "new tokens", "by a graph, ms", "launched, ms", "ratio")]
    for row in data["short"]:
        times = row["graph_ms"], row["launched_ms"]
        layers = "compiled" if row["compiled"] else "as they are"
        ratio = f"{times[0] / times[1]:.2f}"
        rows.append((row["shape"], layers, f"{row['own']:,}", *(f"{time:.1f}" for time in times), ratio))
    return rows


def engine(data: Any) -> Table:
    rows: Table = [
        ("rows", "layers", "sampling", "step, ms", "its graph alone, ms", "GPU idle", "tokens/s with prefill")
    ]
    for row in data["decode"]:
        how = ", ".join(f"{name} {value}" for name, value in row["sampling"].items())
        layers = "compiled" if row["compiled"] else "as they are"
        numbers = (
            f"{row['decode_step_ms']:.2f}",
            f"{row['replay_ms']:.2f}",
            f"{row['idle']:.1%}",
            f"{row['tokens_per_second']:,.0f}",
        )
        rows.append((row["rows"], layers, how, *numbers))
    return rows


def generate(data: Any) -> Table:
    """The newest call of each case."""
    calls = {}
    for run in data.get("runs", [data]):
        for call in run["calls"]:
            if "tree" in call:
                kind = "samples" if "samples" in call else "beams"
                calls[call["prompt"], call["new"], kind, call[kind]] = call, run["commit"]
    ways = {"stock": "stock", "expand": "expand", "session": "`Session`", "tree": "patched"}
    head = (*(f"{shown}, s" for shown in ways.values()), "stock / patched", "GiB, stock and patched", "commit")
    rows: Table = [("prompt + new", "rows", *head)]
    for (prompt, new, kind, count), (call, commit) in sorted(calls.items(), key=lambda one: one[0]):
        times = (seconds(call[way]["s"]) if way in call else "" for way in ways)
        gain, memory = (
            call["stock"]["s"] / call["tree"]["s"],
            (f"{call[way]['peak_gib']:.2f}" for way in ("stock", "tree")),
        )
        rows.append((f"{prompt:,} + {new}", f"{count} {kind}", *times, f"{gain:.1f}x", ", ".join(memory), commit))
    return rows


def memory(data: Any) -> Table:
    known = data["prefix"][0]
    rows: Table = [("what", "with prefixkit's cache", "without", "ratio")]
    rows.append(
        (
            "first token after 4,096 known and 64 new tokens, 8B, s",
            seconds(known["warm_s"]),
            seconds(known["cold_s"]),
            f"{1 / known['warm_of_cold']:.1f}x",
        )
    )
    for row in data["beams"]:
        what = f"{row['beams']} beams, {row['prompt']:,} + {row['new']} tokens, 1B, against transformers, s"
        rows.append((what, seconds(row["session"]["s"]), seconds(row["stock"]["s"]), f"{row['stock_of_session']:.1f}x"))
    return rows


def hybrids(data: Any) -> Table:
    rows: Table = [
        (
            "shape",
            "generate(), s",
            "prefill once, expand, s",
            "prefixkit, s",
            "nothing known, s",
            "4,096 tokens known, s",
        )
    ]
    by_shape: dict[str, dict[str, Any]] = {}
    for call in data["calls"]:
        by_shape.setdefault(call["shape"], {})[call["who"]] = call.get("s")
    rows += [
        (shape, *(seconds(found[who]) for who in ("stock", "expand", "tree", "cold", "known")))
        for shape, found in by_shape.items()
    ]
    return rows


def known(data: Any) -> Table:
    """Calls after a known prefix: the first ones, which launch each kernel, and the later ones, by a graph."""
    found = {(call["shape"], call["who"]): call for call in data["calls"]}
    rows: Table = [("shape", "nothing known, ms", "4,096 tokens known, ms", "its first three calls, ms")]
    for shape in dict.fromkeys(call["shape"] for call in data["calls"]):
        call = found[shape, "known"]
        first = ", ".join(f"{1e3 * each:.0f}" for each in call["each_s"][:3])
        rows.append((shape, f"{1e3 * found[shape, 'cold']['s']:.0f}", f"{1e3 * call['s']:.1f}", first))
    return rows


def latents(data: Any) -> Table:
    rows: Table = [("samples", "who", "s")]
    return rows + [
        (call["samples"], {"stock": "transformers", "tree": "prefixkit"}[call["who"]], seconds(call["s"]))
        for call in data["calls"]
    ]


def sampling(data: Any) -> Table:
    rows: Table = [
        ("rows x vocabulary", "dtype", "greedy, us", "top-p 0.95, us", "all filters, us", "torch: sorted top-p, us")
    ]
    for row in data["results"]:
        times = *(row["us"][name] for name in ("greedy", "top-p", "all filters")), row["rivals_us"]["sorted top-p"]
        rows.append((f"{row['rows']:,} x {row['vocab']:,}", row["dtype"], *(f"{time:.0f}" for time in times)))
    return rows


def campaign(data: Any) -> Table:
    return [
        ("what ends a sample", "tokens of a sample", "tokens/s"),
        *((row["case"], row["mean tokens"], f"{row['tokens/s']:,}") for row in data["rows"]),
    ]


def variants(data: Any) -> Table:
    rows: Table = [("workload", "variant", "over the same attention without it", "over compiled FlexAttention")]
    for row in data["times"]:
        over_flex = f"{row['over_flex']:.2f}" if row.get("over_flex") else "-"
        rows.append(
            (row["workload"], row["variant"], f"{row['over_base']:.2f}" if row.get("over_base") else "-", over_flex)
        )
    return rows


def errors(data: Any) -> Table:
    rows: Table = [
        ("variant", "rms error over the best of FlexAttention's and flash attention's", "of the log-sum-exp")
    ]
    return rows + [(row["variant"], f"{row['over_best']:.2f}", f"{row['lse_over_best']:.2f}") for row in data["errors"]]


def states(data: Any) -> Table:
    names = list(data["results"][0]["us"])
    return [
        ("rows", *(f"{name}, us" for name in names)),
        *((row["rows"], *(f"{row['us'][name]:.1f}" for name in names)) for row in data["results"]),
    ]


def streaming(data: Any) -> Table:
    rows: Table = [("sequences", "ours, us", "keys rotated anew, us", "as the authors' repository, us")]
    for row in data["rows"]:
        if row["part"] == "attention":
            rows.append((row["batch"], *(f"{row[name]['us']:,.0f}" for name in ("ours", "unfused", "repository"))))
    return rows


def weights(data: Any) -> Table:
    rows: Table = [("shape", "each call, ms", "all words compared, ms", "share of a call")]
    return rows + [
        (row["shape"], f"{row['sample']:.2f}", f"{row['all']:.1f}", f"{row['share']:.1%}") for row in data["weights"]
    ]


def forests(data: Any) -> Table:
    found = data["rms error over torch flash attention's"]
    return [
        ("random forests", "rms error over flash attention's: median", "99 of 100", "most", "allowed"),
        (f"{data['forests']:,}", *(found[name] for name in ("median", "99 of 100", "most", "allowed"))),
    ]


def systems(data: Any) -> Table:
    rows: Table = [("system", "tokens/s", "over the first", "memory growth, MiB")]
    first = next(iter(data["results"].values()))["tokens_per_second"]
    for name, found in data["results"].items():
        rate = found["tokens_per_second"]
        growth = f"{found['memory_growth_mib']:,.0f}" if found.get("memory_growth_mib") else "-"
        rows.append((name.replace("_", " "), f"{rate:.1f}", f"{rate / first:.1f}x", growth))
    return rows


def lm_eval(data: Any) -> Table:
    names = {
        "common": "options, the same examples",
        "sampled": "options, other examples",
        "letters": "letters",
        "texts": "16 tokens of text",
    }
    rows: Table = [("task", "hf, s", "prefixkit, s", "hf / prefixkit", "worst difference")]
    return rows + [
        (
            names[row["task"]],
            min(row["hf_s"].values()),
            row["prefixkit_s"],
            f"{row['hf_over_prefixkit']}x",
            f"{row['worst_difference']:.1g}",
        )
        for run in data.get("runs", [data])
        for row in run["tasks"]
    ]


def _over_floors(data: Any) -> Table:
    def cells(row: Any) -> tuple[str, ...]:
        floor, us = row["floor_us"], row["us"]
        return "/".join(map(str, row["heads"])), row["workload"], f"{floor:.1f}", f"{us:.1f}", f"{us / floor:.2f}"

    return [cells(row) for row in data["workloads"]]


def deep(data: Any) -> Table:
    rows: Table = [("heads", "tree", "floor, us", "ours, us", "time / floor", "its plan in a graph, us")]
    plans = [f"{row['plan_us']:.0f}" for row in data["workloads"]]
    return rows + [(*row, plan) for row, plan in zip(_over_floors(data), plans, strict=True)]


def other_heads(data: Any) -> Table:
    rows: Table = [("heads", "tree", "floor, us", "ours, us", "time / floor")]
    return rows + _over_floors(data)


def e4m3(data: Any) -> Table:
    rows: Table = [("heads", "tree", "over bfloat16, us", "over e4m3, us", "e4m3 / bfloat16")]
    return rows + [
        (*names, us, f"{row['e4m3_us']:.1f}", f"{row['e4m3_us'] / row['us']:.2f}")
        for (*names, _, us, _), row in zip(_over_floors(data), data["workloads"], strict=True)
    ]


def planning(data: Any) -> Table:
    rows: Table = [("tree", "on the GPU, us", "by numpy, us")]
    return rows + [
        (row["case"] + (", heavy paths" if row["paths"] else ""), f"{row['gpu_us']:.0f}", f"{row['plan_us']:,.0f}")
        for row in data["results"]
        if row.get("gpu_us") and row["heads"] == [32, 8]
    ]


def grammar(data: Any) -> Table:
    rows: Table = [("shape", "rows", "free, ms a step", "xgrammar", "over free", "llguidance", "over free")]
    for row in data["rows"]:
        pairs = [(name, what) for name in ("xgrammar", "llguidance") for what in ("ms", "over_free")]
        cells = (f"{row[f'{name}_{what}']:.2f}" for name, what in pairs)
        rows.append((row["shape"], row["rows"], f"{row['free_ms']:.2f}", *cells))
    return rows


def trl(data: Any) -> Table:
    told = "prompts x completions", "of tokens", "rollouts by", "rollout, s", "whole step, s", "first rollout, s"
    rows: Table = [(*told, "peak, GiB")]
    for run in data["runs"]:
        of = run["options"]
        sizes = f"{of['prompts']} x {of['samples']}", of["new"]
        rows += [
            (*sizes, row["system"], row["rollout_s"], row["step_s"], row["first_rollout_s"], row["peak_gib"])
            for row in run["systems"]
            if "rollout_s" in row
        ]
    return rows


def interval(ratio: float | None, limits: list[float] | None) -> str:
    return "not comparable" if limits is None else f"{ratio:.2f} ({limits[0]:.2f} to {limits[1]:.2f})"


def tensor_parallel(data: Any) -> Table:
    """For each pair of runs, by one process and by two: times, differences of texts, and their ratios."""
    # The field that names a row of each list, the one with its time, and what the row is called on the page.
    timed = {"steps": ("rows", "step_ms", "a step of {} rows, ms"), "calls": ("call", "seconds", "{}, s")}
    timed |= {"generate": ("rows", "seconds", "`generate()` of {} rows, s")}
    rows: Table = [("shape", "layers", "what", "one GPU", "two GPUs", "two / one")]
    for one, two in zip(data["runs"][::2], data["runs"][1::2], strict=True):
        layers, shape = one["options"]["layers"], one["options"]["shape"].removeprefix("Llama-3.1-")
        shape = shape if layers == "None" else f"{shape}, {layers} layers"
        layers = "compiled" if one["options"]["compiled"] == "True" else "as they are"
        for key, (name, time, what) in timed.items():
            for own, other in zip(one.get(key, ()), two.get(key, ()), strict=False):  # a run may be cut off
                numbers = f"{own[time]:.2f}", f"{other[time]:.2f}", f"{other[time] / own[time]:.2f}"
                rows.append((shape, layers, what.format(own[name]), *numbers))
        for found in two.get("texts", ()):
            told = "difference of log-probabilities", "share of greedy tokens before one differs"
            for value, what, key in zip(("difference", "equal_share"), told, ("ratio", "tokens_ratio"), strict=True):
                apart = (f"{found[name][value]:.3f}" for name in ("batches", "processes"))
                rows.append((shape, layers, what, *apart, interval(found[key], found[f"{key}_interval"])))
    return rows


def kv_dtype(data: Any) -> Table:
    rows: Table = [("K and V in", "nats per token", "rms difference", "largest", "programs that pass")]
    for row in data["rows"]:
        apart = f"{row['nll']:.4f}", f"{row['rms']:.3f}", f"{row['most']:.2f}"
        rows.append((row["kv_dtype"], *apart, f"{row['passed']} of {row['of']}"))
    return rows


def rounding(data: Any) -> Table:
    rows: Table = [("filter", "samples", "differ by prefill chunk", "by KV budget", "by being alone")]
    return rows + [(row["filter"], row["of"], *row["differ"].values()) for row in data["rows"]]


def cpu_variants(data: Any) -> Table:
    names = list(data["variants"][0]["over_causal"])
    return [
        ("tree", *names),
        *((row["tree"], *(f"{row['over_causal'][name]:.2f}" for name in names)) for row in data["variants"]),
    ]
