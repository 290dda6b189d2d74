"""A picture of a JSON of results: time over floor for each workload, ours and the best of the others."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.tree_attention.report import best_rival


def plot(results: Path, picture: Path) -> None:
    """Draw ``results`` into ``picture``, whose ending says how (svg, png)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    found = json.loads(results.read_text())
    rows = sorted(found["workloads"], key=lambda row: row["floor_us"])
    floors = [row["floor_us"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    left.plot(floors, [row["us"] / row["floor_us"] for row in rows], "o", ms=4, label="prefixkit")
    for label, marker, times in (
        ("best rival in this run", "x", [(best_rival(row) or ("", float("nan")))[1] for row in rows]),
        ("best recorded anchor", "+", [row.get("anchor", {}).get("us", float("nan")) for row in rows]),
    ):
        ratios = [time / row["floor_us"] for time, row in zip(times, rows, strict=True)]
        left.plot(floors, ratios, marker, ms=5, alpha=0.7, label=label)
        right.plot(
            floors,
            [time / row["us"] for time, row in zip(times, rows, strict=True)],
            marker,
            ms=5,
            label=f"{label} / ours",
        )
    right.set_yticks([0.5, 0.7, 1.0, 1.4, 2.0, 3.0])
    for axes, what in ((left, "time / floor"), (right, "their time / ours")):
        axes.set(xscale="log", yscale="log", xlabel="floor, us", ylabel=what)
        axes.axhline(1.0, color="grey", lw=0.8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    machine = found["machine"]
    figure.suptitle(
        f"tree attention, {len(rows)} workloads, {machine['gpu']}, torch {machine['torch']}, cuDNN {machine['cudnn']}"
    )
    figure.savefig(picture)
