"""Figures of a JSON of results; each section's are drawn where it has rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLOURS = {
    "none": "0.6",
    "none, compiled": "0.3",
    "flash": "tab:red",
    "flash, fewer at a time": "lightcoral",
    "hydragen": "tab:orange",
    "hydragen, compiled": "peru",
    "hydragen, two levels": "tab:olive",
    "ours": "tab:blue",
    "ours, compiled": "navy",
    "ours, sharing": "tab:blue",
    "ours, not sharing": "tab:red",
    "ours, engine": "tab:cyan",
}


def draw(result: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """Draw into a folder; returns the names of each section's figures."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "prefixkit"
    drawn: dict[str, list[str]] = {}
    for letter, (name, of) in FIGURES.items():
        rows = [row for row in result["rows"] if row["experiment"] == letter and "skipped" not in row]
        figure = of(rows) if rows else None
        if figure is not None:
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            drawn[letter] = [name]
    return drawn


def gain(point: Row, method: str) -> float | None:
    """Speed-up over flash at a point of the grid, if both have a time."""
    flash, mine = point["flash"], point[method]
    return flash / mine if isinstance(flash, float) and isinstance(mine, float) else None


def _subplots(columns: int, rows: int = 1, width: float = 5.2, height: float = 4.0) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )
    return figure, list(axes.flat)


def _logarithmic(axes: Any, values: list[int], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(values)), [f"{value:,}" for value in sorted(set(values))], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel(what)
    axes.grid(alpha=0.3)


def _throughput(rows: list[Row]) -> Any:
    """Tokens per second over batch, and over prefix, for each shape."""
    steps = [row for row in rows if row["kind"] == "step"]
    if not steps:
        return None
    shapes = list(dict.fromkeys(row["shape"] for row in steps))
    figure, panels = _subplots(2, len(shapes))
    for index, shape in enumerate(shapes):
        mine = [row for row in steps if row["shape"] == shape and row["case"]["new"] == _usual(steps, shape, _new)]
        prefix, batch = _usual(mine, shape, _prefix), _usual([r for r in mine if _prefix(r) > 1], shape, _batch)
        for axes, of, fixed, what in (
            (panels[2 * index], _batch, [row for row in mine if _prefix(row) == prefix], "batch"),
            (panels[2 * index + 1], _prefix, [row for row in mine if _batch(row) == batch], "prefix, tokens"),
        ):
            for name in dict.fromkeys(name for row in fixed for name in row["methods"]):
                points = sorted(
                    (of(row), found["tokens_per_s"])
                    for row in fixed
                    if "tokens_per_s" in (found := row["methods"].get(name, {}))
                )
                axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[name], label=name) if points else None
            _logarithmic(axes, [of(row) for row in fixed], what)
            axes.set(
                ylabel="tokens/s", title=f"{shape}, " + (f"prefix {prefix:,}" if of is _batch else f"batch {batch:,}")
            )
            axes.set_ylim(bottom=0)
        panels[2 * index].legend(fontsize=8)
    return figure


def _batch(row: Row) -> int:
    return int(row["case"]["batch"])


def _prefix(row: Row) -> int:
    return int(row["case"]["levels"][0][1])


def _new(row: Row) -> int:
    return int(row["case"]["new"])


def _usual(rows: list[Row], shape: str, of: Callable[[Row], int]) -> int:
    """The value that most rows of a shape have."""
    values = [of(row) for row in rows if row["shape"] == shape]
    return max(values, key=values.count)


def _grid(rows: list[Row]) -> Any:
    """A heat map of speed-ups for each method and suffix."""
    import numpy as np

    rows = sorted(rows, key=lambda row: (row["heads"], row["suffix"]))
    figure, panels = _subplots(2, len(rows), width=4.6, height=3.2)
    for index, row in enumerate(rows):
        batches = sorted({point["batch"] for point in row["points"]})
        prefixes = sorted({point["prefix"] for point in row["points"]})
        for axes, method in zip(panels[2 * index : 2 * index + 2], ("hydragen", "ours"), strict=True):
            gains = np.full((len(batches), len(prefixes)), np.nan)
            for point in row["points"]:
                where = batches.index(point["batch"]), prefixes.index(point["prefix"])
                gains[where] = gain(point, method) or np.nan
            axes.imshow(np.log2(gains), cmap="RdYlGn", vmin=-5, vmax=5, aspect="auto", origin="lower")
            for (y, x), value in np.ndenumerate(gains):
                if value == value:
                    dark = abs(np.log2(value)) > 3.5
                    axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=8, color="w" if dark else "k")
            axes.set_xticks(range(len(prefixes)), [f"{prefix:,}" for prefix in prefixes])
            axes.set_yticks(range(len(batches)), [f"{batch:,}" for batch in batches])
            heads = f"{row['heads'][0]}/{row['heads'][1]}"
            axes.set(
                xlabel="prefix", ylabel="batch", title=f"{method} over flash, heads {heads}, suffix {row['suffix']}"
            )
            axes.title.set_fontsize(9)
    return figure


def _documents(rows: list[Row]) -> Any:
    figure, (axes,) = _subplots(1)
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=_batch):
        for name, found in row["methods"].items():
            if "total_s" in found:
                lines.setdefault(name, []).append((_batch(row), found["total_s"]))
        lines.setdefault("ours, engine", []).append((_batch(row), row["engine"]["seconds"]))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[name], label=name)
    _logarithmic(axes, [_batch(row) for row in rows], "questions")
    axes.set(ylabel="seconds", title=f"{_prefix(rows[0]):,} tokens, {rows[0]['shape']}")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


def _problems(rows: list[Row]) -> Any:
    figure, (axes,) = _subplots(1, width=max(5.2, 2.6 * len(rows)))
    names = ("none", "flash", "hydragen", "hydragen, two levels", "ours")
    rows = sorted(rows, key=lambda row: (row["shape"], _batch(row)))
    for index, row in enumerate(rows):
        for place, name in enumerate(names):
            seconds = row["methods"].get(name, {}).get("decode_s")
            at, label = index + (place - 2) * 0.16, name if index == 0 else None
            axes.bar(at, seconds or 0.0, 0.15, color=COLOURS[name], label=label)
            if seconds is None:
                axes.text(at, 0, " does not fit", rotation=90, ha="center", va="bottom", fontsize=7)
    names_of_rows = [f"{row['shape']}\n{row['name']}" for row in rows]
    axes.set_xticks(range(len(rows)), names_of_rows, fontsize=8)
    axes.set(ylabel="decode, seconds")
    axes.legend(fontsize=8)
    return figure


def _parallel(rows: list[Row]) -> Any:
    steps = sorted((row for row in rows if row["kind"] == "step"), key=lambda row: row["n"])
    if not steps:
        return None
    figure, (axes,) = _subplots(1)
    for name in steps[0]["methods"]:
        points = [(row["n"], found["step_ms"]) for row in steps if "step_ms" in (found := row["methods"].get(name, {}))]
        axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[name], label=name) if points else None
    engine = sorted((row["n"], row["step_ms"]) for row in rows if row["kind"] == "engine")
    if engine:
        axes.plot(*zip(*engine, strict=True), "s--", ms=4, color=COLOURS["ours, engine"], label="ours, engine")
    _logarithmic(axes, [row["n"] for row in steps], "samples of each request")
    axes.set(ylabel="milliseconds between tokens", title=steps[0]["shape"])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


FIGURES: dict[str, tuple[str, Callable[[list[Row]], Any]]] = {
    "a": ("throughput", _throughput),
    "b": ("grid", _grid),
    "c": ("document", _documents),
    "d": ("problems", _problems),
    "n": ("parallel", _parallel),
}
