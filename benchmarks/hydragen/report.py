"""The report of a JSON of results: a page, with the prose of ``page.md``, and a figure for each experiment that has rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Row, geomean, table

SMALLER_FLASH = "flash, fewer at a time"
STEP_COLUMNS = ("none", "none, compiled", "flash", "hydragen", "ours", "hydragen, compiled", "ours, compiled")
PROBLEM_COLUMNS = ("none", "flash", "hydragen", "hydragen, two levels", "ours")
PARALLEL_COLUMNS = ("none", "ours, sharing", "ours, not sharing", "hydragen")
COLOURS = {
    "none": "0.6",
    "none, compiled": "0.3",
    "flash": "tab:red",
    SMALLER_FLASH: "lightcoral",
    "hydragen": "tab:orange",
    "hydragen, compiled": "peru",
    "hydragen, two levels": "tab:olive",
    "ours": "tab:blue",
    "ours, compiled": "navy",
    "ours, sharing": "tab:blue",
    "ours, not sharing": "tab:red",
    "ours, engine": "tab:cyan",
}
WIDTH = 120  # columns of the page's prose; tables are wider
# For each name its points.
Lines = dict[str, list[tuple[int, float]]]
INTRO, *_named = Path(__file__).with_name("page.md").read_text().split("\n=== ")
NOTES = {name: note.strip() for name, _, note in (part.partition("\n") for part in _named)}


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write ``hydragen.md`` and ``hydragen/*.svg`` into a folder; returns the page's path."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "prefixkit"
    (folder / "hydragen").mkdir(parents=True, exist_ok=True)
    parts = list(_checks(result["checks"]))
    for letter, (title, picture, section, draw) in SECTIONS.items():
        rows = [_flat(row) for row in result["rows"] if row["experiment"] == letter and "skipped" not in row]
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
    """A note of ``page.md`` with its values filled in, in lines of the page's width."""
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


def _checks(checks: dict[str, Row]) -> Iterator[str]:
    methods = list(dict.fromkeys(name for found in checks.values() for name in found))
    if checks:
        yield _note("checks")
        rows = [(shape, *(found.get(name, "-") for name in methods)) for shape, found in checks.items()]
        yield table(("shape", *methods), rows)


def number(row: Row, method: str, what: str = "step_ms") -> float | None:
    """A method's milliseconds of a step, or its ``tokens_per_s`` and the like, if it has any."""
    return row["methods"].get(method, {}).get(what)


def cells(row: Row, methods: tuple[str, ...], what: str = "step_ms") -> list[str]:
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


def _sorted(rows: list[Row], *names: str) -> list[Row]:
    return sorted(rows, key=itemgetter(*names))


def _steps(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of steps, by shape."""
    by_shape: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "step":
            by_shape.setdefault(row["shape"], []).append(row)
    return by_shape


def _throughput(rows: list[Row]) -> Iterator[str]:
    gains = ("hydragen / ours", "ours over flash", "flash tokens/s", "hydragen", "ours", "ours, compiled")
    head = ("batch", "prefix", "new", "floor", *STEP_COLUMNS, "aim", "ours, compiled / aim", *gains)
    for shape, steps in _steps(rows).items():
        lines = []
        for row in _sorted(steps, "prefix", "new", "batch"):
            rates = [number(row, name, "tokens_per_s") for name in ("flash", "hydragen", "ours", "ours, compiled")]
            rates[0] = rates[0] or number(row, SMALLER_FLASH, "tokens_per_s")
            what = row["batch"], row["prefix"], row["new"], f"{row['floor_ms']:.2f}", *cells(row, STEP_COLUMNS)
            aim = f"{row['aim_ms']:.2f}" if "aim_ms" in row else "-"
            over_aim = ratio(number(row, "ours, compiled"), row.get("aim_ms"))
            gained = ratio(number(row, "hydragen"), number(row, "ours")), ratio(rates[2], rates[0])
            lines.append((*what, aim, over_aim, *gained, *(f"{rate:,.0f}" if rate else "-" for rate in rates)))
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
    for row in _sorted(rows, "heads", "suffix"):
        for method in ("hydragen", "ours"):
            gains = [gained for point in row["points"] if (gained := gain(point, method))]
            over = [point[method] / point["floor_us"] for point in row["points"] if isinstance(point[method], float)]
            numbers = f"{geomean(gains):.2f}x", f"{max(gains, default=float('nan')):.1f}x", f"{geomean(over):.2f}"
            lines.append((f"{row['heads'][0]}/{row['heads'][1]}", row["suffix"], method, len(gains), *numbers))
    yield _note("grid")
    yield table(("heads", "suffix", "method", "points", "speed-up, geometric mean", "most", "time / floor"), lines)


def _documents(rows: list[Row]) -> Iterator[str]:
    names = ("none", "flash", "hydragen", "ours")
    yield _note("documents", **rows[0])
    lines = [
        (row["batch"], *cells(row, names, "total_s"), f"{row['engine']['seconds']:.2f}")
        for row in _sorted(rows, "batch")
    ]
    yield table(("questions", *names, "ours, engine"), lines)


def _problems(rows: list[Row]) -> Iterator[str]:
    lines = []
    for row in _sorted(rows, "shape", "batch"):
        (_, shots), (problems, tokens) = row["case"]["levels"]
        what = row["shape"], problems, row["batch"] // problems, shots, tokens, f"{row['floor_ms']:.2f}"
        gains = (ratio(number(row, name), number(row, "ours")) for name in PROBLEM_COLUMNS[2:4])
        lines.append((*what, *cells(row, PROBLEM_COLUMNS), *gains))
    head = ("shape", "problems", "samples", "examples", "problem", "floor", *PROBLEM_COLUMNS)
    yield _note("problems")
    yield table((*head, "one level / ours", "two levels / ours"), lines)


def _parallel(rows: list[Row]) -> Iterator[str]:
    engine = {row["n"]: f"{row['step_ms']:.2f}" for row in rows if row["kind"] == "engine"}
    steps, lines = _sorted([row for row in rows if row["kind"] == "step"], "n"), []
    for row in steps:
        gained = ratio(number(row, "ours, not sharing"), number(row, "ours, sharing"))
        what = row["n"], row["batch"], f"{row['floor_ms']:.2f}", *cells(row, PARALLEL_COLUMNS)
        lines.append((*what, gained, engine.get(row["n"], "-")))
    requests, prompt = steps[0]["case"]["levels"][0] if steps else ("some", "some")
    yield _note("parallel", shape=rows[0]["shape"], requests=requests, prompt=prompt)
    yield table(("n", "batch", "floor", *PARALLEL_COLUMNS, "not sharing / sharing", "ours, engine"), lines)


def _subplots(columns: int, rows: int = 1, width: float = 5.2, height: float = 4.0) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, list(axes.flat)


def _lines(axes: Any, of: Lines, ticks: list[int], what: str, dashed: str = "", **labels: str) -> None:
    """A line for each name over a logarithmic axis."""
    for name, points in of.items():
        if points:
            style = "s--" if name == dashed else "o-"
            axes.plot(*zip(*sorted(points), strict=True), style, ms=4, color=COLOURS[name], label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(ticks)), [f"{value:,}" for value in sorted(set(ticks))], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel(what)
    axes.grid(alpha=0.3)
    axes.set(**labels)
    axes.set_ylim(bottom=0)


def _points(rows: list[Row], x: str, y: str) -> Lines:
    """For each method that any row has, what it reached over ``x``."""
    names = dict.fromkeys(name for row in rows for name in row["methods"])
    return {name: [(row[x], value) for row in rows if (value := number(row, name, y)) is not None] for name in names}


def _draw_throughput(rows: list[Row]) -> Any:
    """Tokens per second over batch, and over prefix, for each shape."""
    shapes = _steps(rows)
    if not shapes:
        return None
    figure, panels = _subplots(2, len(shapes))
    for index, (shape, steps) in enumerate(shapes.items()):
        mine = [row for row in steps if row["new"] == _usual(steps, "new")]
        usual = {"prefix": _usual(mine, "prefix"), "batch": _usual([row for row in mine if row["prefix"] > 1], "batch")}
        both = (("batch", "prefix", "batch"), ("prefix", "batch", "prefix, tokens"))
        for axes, (over, fixed, what) in zip(panels[2 * index :], both, strict=False):
            at = [row for row in mine if row[fixed] == usual[fixed]]
            labels = {"ylabel": "tokens/s", "title": f"{shape}, {fixed} {usual[fixed]:,}"}
            _lines(axes, _points(at, over, "tokens_per_s"), [row[over] for row in at], what, **labels)
        panels[2 * index].legend(fontsize=8)
    return figure


def _usual(rows: list[Row], name: str) -> int:
    """The value that most rows have."""
    values = [row[name] for row in rows]
    return max(values, key=values.count)


def _draw_grid(rows: list[Row]) -> Any:
    """A heat map of speed-ups for each method and suffix."""
    figure, panels = _subplots(2, len(rows), width=4.6, height=3.2)
    each = [(row, method) for row in _sorted(rows, "heads", "suffix") for method in ("hydragen", "ours")]
    for axes, (row, method) in zip(panels, each, strict=True):
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


def _draw_lines(points: Lines, ticks: list[int], what: str, dashed: str = "", **labels: str) -> Any:
    """A figure of lines alone."""
    figure, (axes,) = _subplots(1)
    _lines(axes, points, ticks, what, dashed, **labels)
    axes.legend(fontsize=8)
    return figure


def _draw_documents(rows: list[Row]) -> Any:
    rows = _sorted(rows, "batch")
    engine = {"ours, engine": [(row["batch"], row["engine"]["seconds"]) for row in rows]}
    points, ticks = _points(rows, "batch", "total_s") | engine, [row["batch"] for row in rows]
    title = f"{rows[0]['prefix']:,} tokens, {rows[0]['shape']}"
    return _draw_lines(points, ticks, "questions", ylabel="seconds", title=title)


def _draw_problems(rows: list[Row]) -> Any:
    figure, (axes,) = _subplots(1, width=max(5.2, 2.6 * len(rows)))
    rows = _sorted(rows, "shape", "batch")
    for index, row in enumerate(rows):
        for place, name in enumerate(PROBLEM_COLUMNS):
            seconds, at = number(row, name, "decode_s"), index + (place - 2) * 0.16
            axes.bar(at, seconds or 0.0, 0.15, color=COLOURS[name], label=name if index == 0 else None)
            if seconds is None:
                axes.text(at, 0, " does not fit", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(rows)), [f"{row['shape']}\n{row['name']}" for row in rows], fontsize=8)
    axes.set(ylabel="decode, seconds")
    axes.legend(fontsize=8)
    return figure


def _draw_parallel(rows: list[Row]) -> Any:
    steps = [row for row in rows if row["kind"] == "step"]
    if not steps:
        return None
    engine = {"ours, engine": [(row["n"], row["step_ms"]) for row in rows if row["kind"] == "engine"]}
    points, ticks = _points(steps, "n", "step_ms") | engine, [row["n"] for row in steps]
    labels = {"ylabel": "milliseconds between tokens", "title": steps[0]["shape"]}
    return _draw_lines(points, ticks, "samples of each request", "ours, engine", **labels)


SECTIONS = {
    "a": ("Decoding throughput", "throughput", _throughput, _draw_throughput),
    "b": ("One layer's attention", "grid", _grid, _draw_grid),
    "c": ("Questions about a long document", "document", _documents, _draw_documents),
    "d": ("Two levels of sharing", "problems", _problems, _draw_problems),
    "n": ("Parallel generation", "parallel", _parallel, _draw_parallel),
}
