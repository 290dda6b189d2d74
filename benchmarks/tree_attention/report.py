"""What came out: lines, summaries, one JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Floors above: time over floor counts.  Below: microseconds above it.
LONG_US, SHORT_US = 30.0, 10.0
ANCHORS = Path(__file__).parents[1] / "anchors" / "h200_decode_attention.json"


def anchors(path: Path = ANCHORS) -> dict[tuple[int, int, str], Row]:
    """Recorded times of other systems, by query heads, KV heads and workload."""
    known = json.loads(path.read_text())["workloads"]
    return {(w["q_heads"], w["kv_heads"], w["workload"]): w for w in known}


def best_rival(row: Row) -> tuple[str, float] | None:
    """The fastest rival of this run."""
    timed = {name: us for name, us in row["rivals"].items() if isinstance(us, int | float)}
    return min(timed.items(), key=lambda item: item[1]) if timed else None


def line(row: Row) -> str:
    """One workload in one line."""
    name = f"{row['heads'][0]}/{row['heads'][1]} {row['workload']}"
    text = f"{name:28s} {row['us']:9.1f} us = {row['us'] / row['floor_us']:6.2f} floors of {row['floor_us']:8.1f}"
    rival = best_rival(row)
    if rival:
        text += f" | {rival[0]:18s} {rival[1]:9.1f} {rival[1] / row['us']:5.2f}x"
    if "anchor" in row:
        text += (
            f" | anchor {row['anchor']['best']:12s} {row['anchor']['us']:8.1f} {row['anchor']['us'] / row['us']:5.2f}x"
        )
    return text + f" | plan {row['plan_ms']:.1f} ms"


def summary(rows: list[Row]) -> dict[str, Any]:
    """Geometric means, and who is behind."""
    result: dict[str, Any] = {"workloads": len(rows)}
    for what, ratios in (
        ("anchor", {_name(r): r["anchor"]["us"] / r["us"] for r in rows if "anchor" in r}),
        ("rival", {_name(r): best[1] / r["us"] for r in rows if (best := best_rival(r))}),
    ):
        if ratios:
            worst = min(ratios, key=lambda name: ratios[name])
            result[f"best {what} / ours"] = {
                "geomean": round(_geomean(ratios.values()), 3),
                "ahead": sum(ratio >= 1 for ratio in ratios.values()),
                "of": len(ratios),
                "least": [worst, round(ratios[worst], 3)],
            }
    long = [r["us"] / r["floor_us"] for r in rows if r["floor_us"] > LONG_US]
    short = [r["us"] - r["floor_us"] for r in rows if r["floor_us"] < SHORT_US]
    if long:
        result[f"time / floor, floor above {LONG_US:.0f} us"] = {
            "geomean": round(_geomean(long), 3),
            "most": round(max(long), 3),
        }
    if short:
        result[f"us above floor, floor below {SHORT_US:.0f} us"] = {
            "mean": round(sum(short) / len(short), 2),
            "most": round(max(short), 2),
        }
    return result


def skipped(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Why rivals did not run, and on how many workloads."""
    reasons: dict[str, dict[str, int]] = {}
    for row in rows:
        for name, value in row["rivals"].items():
            if isinstance(value, str):
                why = value if len(value) < 90 else value[:87] + "..."
                of = reasons.setdefault(name, {})
                of[why] = of.get(why, 0) + 1
    return reasons


def compare(before: list[Row], after: list[Row]) -> dict[str, Any]:
    """Earlier time over later time for each workload that both have."""
    known = {_name(row): row["us"] for row in before}
    ratios = {_name(row): round(known[_name(row)] / row["us"], 3) for row in after if _name(row) in known}
    ordered = dict(sorted(ratios.items(), key=lambda item: item[1]))
    return {"geomean": round(_geomean(ordered.values()), 3), "each": ordered} if ordered else {}


def _name(row: Row) -> str:
    return f"{row['heads'][0]}/{row['heads'][1]} {row['workload']}"


def _geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
