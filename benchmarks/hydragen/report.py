"""The report of a JSON of results: a page, with the prose of ``page.md``, and a figure for each experiment."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np

from benchmarks.runner import Row, geomean, table

SMALLER_FLASH = "flash, fewer at a time"
LAYOUT = tomllib.loads(Path(__file__).with_name("report.toml").read_text())
COLUMNS: dict[str, list[str]] = LAYOUT["columns"]
WIDTH = 120  # columns of the page's prose; tables are wider
INTRO, *_named = Path(__file__).with_name("page.md").read_text().split("\n=== ")
NOTES = {name: note.strip() for name, _, note in (part.partition("\n") for part in _named)}
# For each name its points; ticks; labels of the axes and the title.
Panel = tuple[dict[str, list[tuple[int, float]]], list[int], dict[str, str]]


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write ``hydragen.md`` and ``hydragen/*.svg`` into a folder; returns the page's path."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "prefixkit"
    (folder / "hydragen").mkdir(parents=True, exist_ok=True)
    parts, checks = [], result["checks"]
    if checks:
        methods = list(dict.fromkeys(name for found in checks.values() for name in found))
        rows = [(shape, *(found.get(name, "-") for name in methods)) for shape, found in checks.items()]
        parts += [_note("checks"), table(("shape", *methods), rows)]
    for letter, (title, picture) in LAYOUT["sections"].items():
        rows = [_flat(row) for row in result["rows"] if row["experiment"] == letter and "skipped" not in row]
        section, draw = SECTIONS[letter]
        if rows:
            parts += [f"## ({letter}) {title}", *section(rows)]
        if rows and (figure := draw(rows)):
            figure.savefig(folder / "hydragen" / f"{picture}.svg", metadata={"Date": None})
            parts.append(f"![{picture}](hydragen/{picture}.svg)")
    why = itemgetter("experiment", "shape", "name", "skipped")
    if missing := [why(row) for row in result["rows"] if "skipped" in row]:
        parts += ["## Not measured", table(("experiment", "shape", "row", "why"), missing)]
    page = folder / "hydragen.md"
    page.write_text(INTRO.format(machine=_machine(result), rest="\n\n".join(parts)).strip() + "\n")
    return page


def _note(name: str, /, **values: Any) -> str:
    """A note of ``page.md`` with its values filled in."""
    return _wrapped(NOTES[name].format(**values))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _flat(row: Row) -> Row:
    """With the sizes of its case as columns."""
    case = row.get("case", {})
    prefix = case["levels"][0][1] if "levels" in case else case.get("prefix")
    return row | {"batch": case.get("batch"), "prefix": prefix, "new": case.get("new")}


def _machine(result: Row) -> str:
    machine = result["machine"]
    known = (f"{name} {value}" for name, value in machine.items() if name in ("torch", "cudnn", "driver", "triton"))
    text = f"GPU: {machine['gpu']} ({', '.join(known)})."
    if reached := "; ".join(f"{name.replace('_', ' ')} {n}" for name, n in (result.get("ceilings") or {}).items()):
        text += f" Reached in this run: {reached}."
    text += f" It took {result['seconds']:.0f} s in all." if "seconds" in result else ""
    return _wrapped(text + (f" Commit {result['commit']}." if "commit" in result else ""))


def number(row: Row, method: str, what: str = "step_ms") -> float | None:
    """A method's milliseconds of a step, or its ``tokens_per_s`` and the like, if it has any."""
    return row["methods"].get(method, {}).get(what)


def cells(row: Row, methods: list[str], what: str = "step_ms") -> list[str]:
    """Each method's number, or why there is none, in a word or two."""
    found = []
    for method in methods:
        why = row["methods"].get(method, {}).get("skipped", "-")
        short = "does not fit" if why.startswith("does not fit") else why.split(":")[0][:24]
        found.append(f"{value:.2f}" if (value := number(row, method, what)) else short)
    return found


def ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}x" if above and below else "-"


def gain(point: Row, method: str) -> float | None:
    """Speed-up over flash at a point of the grid, if both have a time."""
    flash, mine = point["flash"], point[method]
    return flash / mine if isinstance(flash, float) and isinstance(mine, float) else None


def _steps(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of steps, by shape."""
    steps = [row for row in rows if row["kind"] == "step"]
    return {name: [row for row in steps if row["shape"] == name] for name in dict.fromkeys(r["shape"] for r in steps)}


def _throughput(rows: list[Row]) -> Iterator[str]:
    names = COLUMNS["throughput"]
    gains = ("hydragen / ours", "ours over flash", "flash tokens/s", "hydragen", "ours", "ours, compiled")
    head = ("batch", "prefix", "new", "floor", *names, "aim", "ours, compiled / aim", *gains)
    for shape, steps in _steps(rows).items():
        lines = []
        for row in sorted(steps, key=itemgetter("prefix", "new", "batch")):
            rates = [number(row, name, "tokens_per_s") for name in ("flash", "hydragen", "ours", "ours, compiled")]
            rates[0] = rates[0] or number(row, SMALLER_FLASH, "tokens_per_s")
            line = [row[of] for of in ("batch", "prefix", "new")] + [f"{row['floor_ms']:.2f}", *cells(row, names)]
            line.append(f"{row['aim_ms']:.2f}" if "aim_ms" in row else "-")
            line.append(ratio(number(row, "ours, compiled"), row.get("aim_ms")))
            line += [ratio(number(row, "hydragen"), number(row, "ours")), ratio(rates[2], rates[0])]
            lines.append(line + [f"{rate:,.0f}" if rate else "-" for rate in rates])
        yield _note("throughput", shape=shape)
        yield table(head, lines)
    whole = []
    for row in (row for row in rows if row["kind"] in ("engine", "stock")):
        engine = {"ours, engine": row.get("ours"), "ours, engine, compiled": row.get("compiled")}
        where = row["batch"], row["prefix"], f"{row['prefill_s']:.2f}"
        for name, ran in ({row["what"]: row} if row["kind"] == "stock" else engine).items():
            whole += [(row["shape"], name, *where, f"{ran['tokens_per_s']:,.0f}")] if ran else []
    if whole:
        yield _note("whole runs")
        yield table(("shape", "what", "batch", "prompt", "prefill s", "tokens/s"), whole)


def _grid(rows: list[Row]) -> Iterator[str]:
    lines = []
    for row, method in _grids(rows):
        gains = [gained for point in row["points"] if (gained := gain(point, method))]
        over = [point[method] / point["floor_us"] for point in row["points"] if isinstance(point[method], float)]
        numbers = f"{geomean(gains):.2f}x", f"{max(gains, default=float('nan')):.1f}x", f"{geomean(over):.2f}"
        lines.append((f"{row['heads'][0]}/{row['heads'][1]}", row["suffix"], method, len(gains), *numbers))
    yield _note("grid")
    yield table(("heads", "suffix", "method", "points", "speed-up, geometric mean", "most", "time / floor"), lines)


def _grids(rows: list[Row]) -> list[tuple[Row, str]]:
    return [(row, of) for row in sorted(rows, key=itemgetter("heads", "suffix")) for of in ("hydragen", "ours")]


def _documents(rows: list[Row]) -> Iterator[str]:
    names, lines = COLUMNS["documents"], []
    for row in sorted(rows, key=itemgetter("batch")):
        lines.append((row["batch"], *cells(row, names, "total_s"), f"{row['engine']['seconds']:.2f}"))
    yield _note("documents", **rows[0])
    yield table(("questions", *names, "ours, engine"), lines)


def _problems(rows: list[Row]) -> Iterator[str]:
    names, lines = COLUMNS["problems"], []
    for row in sorted(rows, key=itemgetter("shape", "batch")):
        (_, shots), (problems, tokens) = row["case"]["levels"]
        what = row["shape"], problems, row["batch"] // problems, shots, tokens, f"{row['floor_ms']:.2f}"
        gains = (ratio(number(row, name), number(row, "ours")) for name in names[2:4])
        lines.append((*what, *cells(row, names), *gains))
    head = ("shape", "problems", "samples", "examples", "problem", "floor", *names)
    yield _note("problems")
    yield table((*head, "one level / ours", "two levels / ours"), lines)


def _parallel(rows: list[Row]) -> Iterator[str]:
    engine = {row["n"]: f"{row['step_ms']:.2f}" for row in rows if row["kind"] == "engine"}
    names, lines, levels = COLUMNS["parallel"], [], [("some", "some")]
    for row in sorted((row for row in rows if row["kind"] == "step"), key=itemgetter("n")):
        gained, levels = ratio(number(row, names[2]), number(row, names[1])), row["case"]["levels"]
        what = row["n"], row["batch"], f"{row['floor_ms']:.2f}", *cells(row, names)
        lines.append((*what, gained, engine.get(row["n"], "-")))
    yield _note("parallel", shape=rows[0]["shape"], requests=levels[0][0], prompt=levels[0][1])
    yield table(("n", "batch", "floor", *names, "not sharing / sharing", "ours, engine"), lines)


def _subplots(columns: int, rows: int = 1, width: float = 5.2, height: float = 4.0) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, list(axes.flat)


def _draw_lines(panels: list[Panel], columns: int = 1, dashed: str = "") -> Any:
    """In each panel a line for each name over a logarithmic axis; nothing without panels."""
    figure, every = _subplots(columns, len(panels) // columns) if panels else (None, [])
    for index, (axes, (of, ticks, labels)) in enumerate(zip(every, panels, strict=True)):
        for name, points in of.items():
            if points:
                style, colour = "s--" if name == dashed else "o-", LAYOUT["colours"][name]
                axes.plot(*zip(*sorted(points), strict=True), style, ms=4, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(ticks)), [f"{value:,}" for value in sorted(set(ticks))], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set(**labels)
        axes.set_ylim(bottom=0)
        if index % columns == 0:
            axes.legend(fontsize=8)
    return figure


def _panel(rows: list[Row], x: str, y: str, *, engine: list[tuple[int, float]] | None = None, **labels: str) -> Panel:
    """What each method that any row has reached over ``x``."""
    names, lines = dict.fromkeys(name for row in rows for name in row["methods"]), {}
    for name in names:
        lines[name] = [(row[x], value) for row in rows if (value := number(row, name, y)) is not None]
    return lines | ({} if engine is None else {"ours, engine": engine}), [row[x] for row in rows], labels


def _draw_throughput(rows: list[Row]) -> Any:
    """Tokens per second over batch, and over prefix, for each shape, where the other is as in most rows."""
    panels = []
    for shape, steps in _steps(rows).items():
        new = mode(row["new"] for row in steps)
        mine = [row for row in steps if row["new"] == new]
        prefix = mode(row["prefix"] for row in mine)
        usual = {"prefix": prefix, "batch": mode(row["batch"] for row in mine if row["prefix"] > 1)}
        for over, fixed, what in (("batch", "prefix", "batch"), ("prefix", "batch", "prefix, tokens")):
            at = [row for row in mine if row[fixed] == usual[fixed]]
            labels = {"xlabel": what, "ylabel": "tokens/s", "title": f"{shape}, {fixed} {usual[fixed]:,}"}
            panels.append(_panel(at, over, "tokens_per_s", **labels))
    return _draw_lines(panels, columns=2)


def _draw_grid(rows: list[Row]) -> Any:
    """A heat map of speed-ups for each method and suffix."""
    figure, panels = _subplots(2, len(rows), width=4.6, height=3.2)
    for axes, (row, method) in zip(panels, _grids(rows), strict=True):
        batches, prefixes = (sorted({point[name] for point in row["points"]}) for name in ("batch", "prefix"))
        gains = np.full((len(batches), len(prefixes)), np.nan)
        for point in row["points"]:
            gains[batches.index(point["batch"]), prefixes.index(point["prefix"])] = gain(point, method) or np.nan
        axes.imshow(np.log2(gains), cmap="RdYlGn", vmin=-5, vmax=5, aspect="auto", origin="lower")
        for (y, x), value in np.ndenumerate(gains):
            if value == value:
                colour = "w" if abs(np.log2(value)) > 3.5 else "k"
                axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(prefixes)), [f"{prefix:,}" for prefix in prefixes])
        axes.set_yticks(range(len(batches)), [f"{batch:,}" for batch in batches])
        title = f"{method} over flash, heads {row['heads'][0]}/{row['heads'][1]}, suffix {row['suffix']}"
        axes.set(xlabel="prefix", ylabel="batch", title=title)
        axes.title.set_fontsize(9)
    return figure


def _draw_documents(rows: list[Row]) -> Any:
    rows = sorted(rows, key=itemgetter("batch"))
    labels = {"ylabel": "seconds", "title": f"{rows[0]['prefix']:,} tokens, {rows[0]['shape']}"}
    engine = [(row["batch"], row["engine"]["seconds"]) for row in rows]
    return _draw_lines([_panel(rows, "batch", "total_s", engine=engine, xlabel="questions", **labels)])


def _draw_problems(rows: list[Row]) -> Any:
    figure, (axes,) = _subplots(1, width=max(5.2, 2.6 * len(rows)))
    rows = sorted(rows, key=itemgetter("shape", "batch"))
    for index, row in enumerate(rows):
        for place, name in enumerate(COLUMNS["problems"]):
            seconds, at = number(row, name, "decode_s"), index + (place - 2) * 0.16
            label, colour = name if index == 0 else None, LAYOUT["colours"][name]
            axes.bar(at, seconds or 0.0, 0.15, color=colour, label=label)
            if seconds is None:
                axes.text(at, 0, " does not fit", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(rows)), [f"{row['shape']}\n{row['name']}" for row in rows], fontsize=8)
    axes.set(ylabel="decode, seconds")
    axes.legend(fontsize=8)
    return figure


def _draw_parallel(rows: list[Row]) -> Any:
    steps = [row for row in rows if row["kind"] == "step"]
    engine = [(row["n"], row["step_ms"]) for row in rows if row["kind"] == "engine"]
    labels = {"xlabel": "samples of each request", "ylabel": "milliseconds between tokens"}
    panels = [_panel(steps, "n", "step_ms", engine=engine, title=steps[0]["shape"], **labels)] if steps else []
    return _draw_lines(panels, dashed="ours, engine")


SECTIONS = {
    "a": (_throughput, _draw_throughput),
    "b": (_grid, _draw_grid),
    "c": (_documents, _draw_documents),
    "d": (_problems, _draw_problems),
    "n": (_parallel, _draw_parallel),
}
