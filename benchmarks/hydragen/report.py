"""The report of a JSON of results: the tables of ``docs/appendix/hydragen.md``, whose prose is not changed."""

import math
import re
import textwrap
from operator import itemgetter
from pathlib import Path

from benchmarks.hydragen.experiments import SMALLER_FLASH
from benchmarks.runner import ROOT, Row, table

BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)  # parts of the page that are written anew
SECTIONS = {"a": "throughput", "c": "document", "d": "problems", "n": "parallel"}
FLOORS, SLACK = 1.35, 0.03  # the aim: compiled ceiling + FLOORS x attention's floor, and SLACK of it more
RATIOS = {"hydragen": "ours", "hydragen, two levels": "ours", "ours, not sharing": "ours, sharing"}


def write(result: Row, folder: Path) -> Path:
    """Write ``hydragen.md`` into a folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    checks, why = result["checks"], ("experiment", "shape", "name", "skipped")
    methods = list(dict.fromkeys(name for found in checks.values() for name in found))
    rows = [(shape, *(found.get(name, "-") for name in methods)) for shape, found in checks.items()]
    missing = [itemgetter(*why)(row) for row in result["rows"] if "skipped" in row]
    parts = {"machine": machine(result), "checks": table(("shape", *methods), rows), "missing": table(why, missing)}
    for letter, name in SECTIONS.items():
        parts[name] = section([row for row in result["rows"] if row["experiment"] == letter])
    page, prose = folder / "hydragen.md", (ROOT / "docs" / "appendix" / "hydragen.md").read_text()
    page.write_text(BLOCK.sub(lambda at: f"<!-- {at[1]} -->\n\n{parts.get(at[1], '')}\n\n<!-- end -->", prose))
    return page


def machine(result: Row) -> str:
    found, reached = result["machine"], result.get("ceilings") or {}
    known = (f"{name} {value}" for name, value in found.items() if name in ("torch", "cudnn", "driver", "triton"))
    text = f"GPU: {found['gpu']} ({', '.join(known)}). Reached in this run: "
    text += "; ".join(f"{name.replace('_', ' ')} {n}" for name, n in reached.items())
    text += f". It took {result['seconds']:.0f} s in all. Commit {result.get('commit')}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def section(rows: list[Row]) -> str:
    """A table for each shape, with the columns that any of its cases has."""
    by_shape: dict[str, list[Row]] = {}
    for row in rows:
        if "case" in row and "levels" in row["case"]:  # older results have whole runs too
            by_shape.setdefault(row["shape"], []).append(row)
    parts = []
    for shape, of_shape in by_shape.items():
        ordered = sorted(of_shape, key=lambda row: (row["case"]["levels"], row["case"]["new"], row["case"]["batch"]))
        lines = [columns(row) for row in ordered]
        head = list(dict.fromkeys(name for line in lines for name in line))
        parts.append(f"{shape}:\n\n{table(head, ([line.get(name, '-') for name in head] for line in lines))}")
    return "\n\n".join(parts)


def columns(row: Row) -> Row:
    """A case's cells: milliseconds of each method, or in a word or two why it has none; ratios; tokens per second."""
    case, methods = row["case"], [name for name in row["methods"] if name != SMALLER_FLASH]
    found: Row = {
        "batch": case["batch"],
        "shared": ", ".join(f"{nodes} x {tokens}" for nodes, tokens in case["levels"]),
    }
    found |= {"private": case["private"]} if case["private"] else {}
    found |= {"new": case["new"], "floor": f"{row['floor_ms']:.2f}"}
    for name in methods:
        why = row["methods"][name].get("skipped", "-").split(":")[0][:24]
        found[name] = shown(number(row, name), otherwise=why)
    if "none, compiled" in methods:
        aim = (number(row, "none, compiled") + FLOORS * row["floor_ms"]) * (1 + SLACK)
        found["aim"] = shown(aim)
        found["ours, compiled / aim"] = shown(number(row, "ours, compiled") / aim, "{:.2f}x")
    for name in (name for name in methods if RATIOS.get(name) in methods):
        found[f"{name} / {RATIOS[name]}"] = shown(number(row, name) / number(row, RATIOS[name]), "{:.2f}x")
    rates = {name: number(row, name, "tokens_per_s") for name in methods if not name.startswith("none")}
    if math.isnan(rates.get("flash", 0.0)):
        rates["flash"] = number(row, SMALLER_FLASH, "tokens_per_s")
    if {"ours", "flash"} <= rates.keys():
        found["ours over flash"] = shown(rates["ours"] / rates["flash"], "{:.2f}x")
    return found | {f"{name} tokens/s": shown(rate, "{:,.0f}") for name, rate in rates.items()}


def number(row: Row, method: str, what: str = "step_ms") -> float:
    """A method's milliseconds of a step, or ``tokens_per_s``; NaN if it has none."""
    return float(row["methods"].get(method, {}).get(what, math.nan))


def shown(value: float, how: str = "{:.2f}", otherwise: str = "-") -> str:
    return otherwise if math.isnan(value) else how.format(value)
