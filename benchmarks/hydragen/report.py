"""The report of a JSON of results: one markdown page, and figures beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.hydragen import figures

Row = dict[str, Any]
SMALLER_FLASH = "flash, fewer at a time"  # throughput's, which needs torch
STEP_COLUMNS = ("none", "none, compiled", "flash", "hydragen", "ours", "hydragen, compiled", "ours, compiled")

INTRO = """# Hydragen's experiments

The experiments of *Hydragen: High-Throughput LLM Inference with Shared Prefixes* (Juravsky et al. 2024) and FlashInfer's
parallel generation, on one GPU. `python -m benchmarks.hydragen` measures them and writes this page.

{machine}

**A step** is one token for each sequence: embedding, all layers, logits, the likeliest token, captured as one CUDA graph
and replayed (the median counts). Models have their published sizes and random bf16 weights; the KV of prefixes and
suffixes is random too, for times do not depend on it. A step is measured when 1, half and all of the new tokens are
drawn, and averaged. What does not fit the GPU's memory says so.

| method | attention of each layer |
|---|---|
| none | none, and nothing appended: the ceiling |
| flash | FlashAttention (torch's), each sequence's KV in full: nothing shared |
| hydragen | queries against the prefix by flash or cuDNN, the faster; against suffixes by flash; one fused merge |
| ours | prefixkit's tree attention; planned anew for each length, which is not counted here but in the engine's runs |

All run inside the same patched transformers model, with its own modules; *compiled* runs the same modules through
`torch.compile`, cut where attention is, and packs q, k and v where each is too small to fill the GPU;
but *none* has them apart, and is spared k and v, which nobody needs there. Compiled, *ours* turns queries and keys and
appends in one launch, as prefixkit's compiled layers do. *Floor* is the larger of attention's bytes
(KV once, queries, output) over 4.3 TB/s and its flops over 790 TFLOP/s. *Aim* is 1.03 x (none, compiled + 1.35 x floor).
"""


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write ``hydragen.md`` and ``hydragen/*.svg`` into a folder; returns the page's path."""
    pictures = folder / "hydragen"
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(result, pictures)
    parts = [INTRO.format(machine=_machine(result)), _checks(result["checks"])]
    for letter, (title, section) in SECTIONS.items():
        rows = [row for row in result["rows"] if row["experiment"] == letter and "skipped" not in row]
        if rows:
            shown = [f"![{name}](hydragen/{name}.svg)" for name in drawn.get(letter, [])]
            parts += [f"## ({letter}) {title}", section(rows), *shown]
    parts.append(_missing(result["rows"]))
    page = folder / "hydragen.md"
    page.write_text("\n\n".join(part.strip() for part in parts if part.strip()) + "\n")
    return page


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def step_ms(row: Row, method: str) -> float | None:
    """A method's milliseconds, if it has any."""
    found: float | None = row["methods"].get(method, {}).get("step_ms")
    return found


def tokens_per_s(row: Row, method: str) -> float | None:
    """A method's throughput, if it has any."""
    found: float | None = row["methods"].get(method, {}).get("tokens_per_s")
    return found


def cell(row: Row, method: str) -> str:
    """A method's step, or why there is none, in a word or two."""
    found = row["methods"].get(method, {})
    if "step_ms" in found:
        return f"{found['step_ms']:.2f}"
    why = found.get("skipped", "-")
    return "does not fit" if why.startswith("does not fit") else why.split(":")[0][:24]


def ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}x" if above and below else "-"


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else float("nan")


def _machine(result: dict[str, Any]) -> str:
    machine, ceilings = result["machine"], result.get("ceilings") or {}
    known = ", ".join(
        f"{name} {value}" for name, value in machine.items() if name in ("torch", "cudnn", "driver", "triton")
    )
    reached = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in ceilings.items())
    took = f" It took {result['seconds']:.0f} s in all." if "seconds" in result else ""
    took += f" Commit {result['commit']}." if "commit" in result else ""
    return f"GPU: {machine['gpu']} ({known})." + (f" Reached in this run: {reached}." if reached else "") + took


def _checks(checks: dict[str, dict[str, float]]) -> str:
    if not checks:
        return ""
    methods = list(dict.fromkeys(name for found in checks.values() for name in found))
    rows = [(shape, *(found.get(name, "-") for name in methods)) for shape, found in checks.items()]
    head = "Each method's attention against ours on the same KV, as norm of the difference over norm:\n\n"
    return head + table(("shape", *methods), rows)


def _throughput(rows: list[Row]) -> str:
    parts = []
    steps = [row for row in rows if row["kind"] == "step"]
    for shape in dict.fromkeys(row["shape"] for row in steps):
        mine = [row for row in steps if row["shape"] == shape]
        lines = []
        for row in sorted(
            mine, key=lambda row: (row["case"]["levels"][0][1], row["case"]["new"], row["case"]["batch"])
        ):
            case = row["case"]
            flash = tokens_per_s(row, "flash") or tokens_per_s(row, SMALLER_FLASH)
            rates = flash, tokens_per_s(row, "hydragen"), tokens_per_s(row, "ours"), tokens_per_s(row, "ours, compiled")
            lines.append(
                (
                    case["batch"],
                    case["levels"][0][1],
                    case["new"],
                    f"{row['floor_ms']:.2f}",
                    *(cell(row, method) for method in STEP_COLUMNS),
                    f"{row['aim_ms']:.2f}" if "aim_ms" in row else "-",
                    ratio(step_ms(row, "ours, compiled"), row.get("aim_ms")),
                    ratio(step_ms(row, "hydragen"), step_ms(row, "ours")),
                    ratio(rates[2], flash),
                    *(f"{rate:,.0f}" if rate else "-" for rate in rates),
                )
            )
        head = ("batch", "prefix", "new", "floor", *STEP_COLUMNS, "aim", "ours, compiled / aim")
        gains = ("hydragen / ours", "ours over flash", "flash tokens/s", "hydragen", "ours", "ours, compiled")
        note = (
            f"{shape}, milliseconds of a step, then tokens/s. Where flash does not fit, its tokens/s are those at the largest "
            "batch that does, a power of two below.\n\n"
        )
        parts.append(note + table((*head, *gains), lines))
    whole = [line for row in rows if row["kind"] in ("engine", "stock") for line in _whole_runs(row)]
    if whole:
        note = (
            "Whole runs, sampling at temperature 1. The engine's tokens/s count prefill, capturing, planning and drawing, but "
            "no compiling; those of stock transformers are of its decode steps alone, 12 of them.\n\n"
        )
        parts.append(note + table(("shape", "what", "batch", "prompt", "prefill s", "tokens/s"), whole))
    return "\n\n".join(parts)


def _whole_runs(row: Row) -> list[tuple[object, ...]]:
    """A line for each way that a whole run was done."""
    where = row["case"]["batch"], row["case"]["prefix"], f"{row['prefill_s']:.2f}"
    if row["kind"] == "stock":
        return [(row["shape"], row["what"], *where, f"{row['tokens_per_s']:,.0f}")]
    ways = (("ours, engine", row["ours"]), ("ours, engine, compiled", row.get("compiled")))
    return [(row["shape"], name, *where, f"{ran['tokens_per_s']:,.0f}") for name, ran in ways if ran]


def _grid(rows: list[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row["heads"], row["suffix"])):
        for method in ("hydragen", "ours"):
            gains = [gain for point in row["points"] if (gain := figures.gain(point, method))]
            over = [point[method] / point["floor_us"] for point in row["points"] if isinstance(point[method], float)]
            heads = f"{row['heads'][0]}/{row['heads'][1]}"
            numbers = f"{geomean(gains):.2f}x", f"{max(gains, default=float('nan')):.1f}x", f"{geomean(over):.2f}"
            lines.append((heads, row["suffix"], method, len(gains), *numbers))
    note = (
        "One layer, query heads / KV heads of size 128, bf16; speed-up is flash without sharing over the method. Where "
        "flash's KV would exceed 20 GB its time is that of a smaller batch, scaled. Inputs rotate past the L2.\n\n"
    )
    head = ("heads", "suffix", "method", "points", "speed-up, geometric mean", "most", "time / floor")
    return note + table(head, lines)


def _documents(rows: list[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: row["case"]["batch"]):
        methods = ("none", "flash", "hydragen", "ours")
        totals = (row["methods"].get(name, {}).get("total_s") for name in methods)
        lines.append(
            (
                row["case"]["batch"],
                *(f"{total:.2f}" if total else cell(row, name) for name, total in zip(methods, totals, strict=True)),
                f"{row['engine']['seconds']:.2f}",
            )
        )
    first = rows[0]
    note = (
        f"{first['shape']}, a document of {first['case']['levels'][0][1]:,} tokens, questions of "
        f"{first['question_tokens']} tokens, {first['case']['new']} new tokens each. Seconds: prefill of the document once "
        f"({first['prefill_s']:.2f} s, the engine's) and all decode steps, for every method; the engine's column is one real "
        "run, questions' prefill and drawing included.\n\n"
    )
    return note + table(("questions", "none", "flash", "hydragen", "ours", "ours, engine"), lines)


def _problems(rows: list[Row]) -> str:
    names = ("none", "flash", "hydragen", "hydragen, two levels", "ours")
    lines = []
    for row in sorted(rows, key=lambda row: (row["shape"], row["case"]["batch"])):
        (_, shots), (problems, tokens) = row["case"]["levels"]
        what = row["shape"], problems, row["case"]["batch"] // problems, shots, tokens, f"{row['floor_ms']:.2f}"
        gains = (ratio(step_ms(row, name), step_ms(row, "ours")) for name in names[2:4])
        lines.append((*what, *(cell(row, name) for name in names), *gains))
    note = (
        "Few-shot examples, problems below them, samples below each; 256 new tokens. With one level, Hydragen shares the "
        "examples and each sample holds its problem itself. Milliseconds of a step.\n\n"
    )
    head = (
        "shape",
        "problems",
        "samples",
        "examples",
        "problem",
        "floor",
        *names,
        "one level / ours",
        "two levels / ours",
    )
    return note + table(head, lines)


def _parallel(rows: list[Row]) -> str:
    engine = {row["n"]: row["step_ms"] for row in rows if row["kind"] == "engine"}
    names = ("none", "ours, sharing", "ours, not sharing", "hydragen")
    lines = [
        (
            row["n"],
            row["case"]["batch"],
            f"{row['floor_ms']:.2f}",
            *(cell(row, name) for name in names),
            ratio(step_ms(row, "ours, not sharing"), step_ms(row, "ours, sharing")),
            f"{engine[row['n']]:.2f}" if row["n"] in engine else "-",
        )
        for row in sorted(rows, key=lambda row: row["n"])
        if row["kind"] == "step"
    ]
    first = next((row for row in rows if row["kind"] == "step"), None)
    requests, prompt = first["case"]["levels"][0] if first else ("some", "some")
    note = (
        f"{rows[0]['shape']}, {requests} requests at a time with prompts of {prompt} tokens, n samples of each. Milliseconds "
        "between tokens. Not sharing: the same pages, by a plan that reads them for each sequence.\n\n"
    )
    return note + table(("n", "batch", "floor", *names, "not sharing / sharing", "ours, engine"), lines)


def _missing(rows: list[Row]) -> str:
    lines = [(row["experiment"], row["shape"], row["name"], row["skipped"]) for row in rows if "skipped" in row]
    return "## Not measured\n\n" + table(("experiment", "shape", "row", "why"), lines) if lines else ""


SECTIONS = {
    "a": ("Decoding throughput", _throughput),
    "b": ("One layer's attention", _grid),
    "c": ("Questions about a long document", _documents),
    "d": ("Two levels of sharing", _problems),
    "n": ("Parallel generation", _parallel),
}
