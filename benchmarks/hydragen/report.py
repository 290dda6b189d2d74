"""The report of a JSON of results: a page, with the prose of ``page.md``, and a figure for each experiment."""

import textwrap
import tomllib
from operator import itemgetter
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np

from benchmarks.runner import Row, geomean, table

SMALLER_FLASH = "flash, fewer at a time"
LAYOUT = tomllib.loads(Path(__file__).with_name("report.toml").read_text())
COLUMNS: dict[str, list[str]] = LAYOUT["columns"]
INTRO, *_named = Path(__file__).with_name("page.md").read_text().split("\n=== ")
NOTES = {name: note.strip() for name, _, note in (part.partition("\n") for part in _named)}
WRAPPED = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
Section = tuple[list[str], Any]  # parts of the page, and a figure or None


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
        if rows := [_flat(row) for row in result["rows"] if row["experiment"] == letter and "skipped" not in row]:
            section, figure = SECTIONS[letter](rows)
            parts += [f"## ({letter}) {title}", *section]
            if figure:
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
    return WRAPPED.fill(NOTES[name].format(**values))


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
    return WRAPPED.fill(text + (f" Commit {result['commit']}." if "commit" in result else ""))


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


def throughput(rows: list[Row]) -> Section:
    """Tokens per second over batch, and over prefix, for each shape, where the other is as in most rows."""
    names, parts = COLUMNS["throughput"], []
    gains = ("hydragen / ours", "ours over flash", "flash tokens/s", "hydragen", "ours", "ours, compiled")
    head = ("batch", "prefix", "new", "floor", *names, "aim", "ours, compiled / aim", *gains)
    shapes = dict.fromkeys(row["shape"] for row in rows if row["kind"] == "step")
    figure, axes = _subplots(2, len(shapes)) if shapes else (None, [])
    for index, shape in enumerate(shapes):
        steps, lines = [row for row in rows if row["kind"] == "step" and row["shape"] == shape], []
        for row in sorted(steps, key=itemgetter("prefix", "new", "batch")):
            rates = [number(row, name, "tokens_per_s") for name in ("flash", "hydragen", "ours", "ours, compiled")]
            rates[0] = rates[0] or number(row, SMALLER_FLASH, "tokens_per_s")
            line = [row[of] for of in ("batch", "prefix", "new")] + [f"{row['floor_ms']:.2f}", *cells(row, names)]
            aim = row.get("aim_ms")
            line += [f"{aim:.2f}" if aim else "-", ratio(number(row, "ours, compiled"), aim)]
            line += [ratio(number(row, "hydragen"), number(row, "ours")), ratio(rates[2], rates[0])]
            lines.append(line + [f"{rate:,.0f}" if rate else "-" for rate in rates])
        parts += [_note("throughput", shape=shape), table(head, lines)]
        new = mode(row["new"] for row in steps)
        mine = [row for row in steps if row["new"] == new]
        prefix = mode(row["prefix"] for row in mine)
        batch = mode(row["batch"] for row in mine if row["prefix"] > 1)
        for at, over, fixed, usual in ((0, "batch", "prefix", prefix), (1, "prefix", "batch", batch)):
            labels = {"xlabel": ("batch", "prefix, tokens")[at], "title": f"{shape}, {fixed} {usual:,}"}
            drawn = [row for row in mine if row[fixed] == usual]
            _draw(axes[2 * index + at], drawn, over, "tokens_per_s", ylabel="tokens/s", **labels)
    whole = []
    for row in (row for row in rows if row["kind"] in ("engine", "stock")):
        engine = {"ours, engine": row.get("ours"), "ours, engine, compiled": row.get("compiled")}
        where = row["batch"], row["prefix"], f"{row['prefill_s']:.2f}"
        for name, ran in ({row["what"]: row} if row["kind"] == "stock" else engine).items():
            whole += [(row["shape"], name, *where, f"{ran['tokens_per_s']:,.0f}")] if ran else []
    if whole:
        parts += [_note("whole runs"), table(("shape", "what", "batch", "prompt", "prefill s", "tokens/s"), whole)]
    return parts, figure


def grid(rows: list[Row]) -> Section:
    """A heat map of speed-ups for each method and suffix."""
    figure, panels = _subplots(2, len(rows), width=4.6, height=3.2)
    grids = [(row, of) for row in sorted(rows, key=itemgetter("heads", "suffix")) for of in ("hydragen", "ours")]
    lines = []
    for axes, (row, method) in zip(panels, grids, strict=True):
        heads = f"{row['heads'][0]}/{row['heads'][1]}"
        known = [gained for point in row["points"] if (gained := gain(point, method))]
        over = [point[method] / point["floor_us"] for point in row["points"] if isinstance(point[method], float)]
        numbers = f"{geomean(known):.2f}x", f"{max(known, default=float('nan')):.1f}x", f"{geomean(over):.2f}"
        lines.append((heads, row["suffix"], method, len(known), *numbers))
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
        axes.set(xlabel="prefix", ylabel="batch", title=f"{method} over flash, heads {heads}, suffix {row['suffix']}")
        axes.title.set_fontsize(9)
    head = ("heads", "suffix", "method", "points", "speed-up, geometric mean", "most", "time / floor")
    return [_note("grid"), table(head, lines)], figure


def documents(rows: list[Row]) -> Section:
    names, note, rows = COLUMNS["documents"], _note("documents", **rows[0]), sorted(rows, key=itemgetter("batch"))
    lines = [(row["batch"], *cells(row, names, "total_s"), f"{row['engine']['seconds']:.2f}") for row in rows]
    figure, (axes,) = _subplots()
    engine = [(row["batch"], row["engine"]["seconds"]) for row in rows]
    labels = {"xlabel": "questions", "ylabel": "seconds", "title": f"{rows[0]['prefix']:,} tokens, {rows[0]['shape']}"}
    _draw(axes, rows, "batch", "total_s", engine, **labels)
    return [note, table(("questions", *names, "ours, engine"), lines)], figure


def problems(rows: list[Row]) -> Section:
    names, lines = COLUMNS["problems"], []
    figure, (axes,) = _subplots(width=max(5.2, 2.6 * len(rows)))
    rows = sorted(rows, key=itemgetter("shape", "batch"))
    for index, row in enumerate(rows):
        (_, shots), (problems, tokens) = row["case"]["levels"]
        what = row["shape"], problems, row["batch"] // problems, shots, tokens, f"{row['floor_ms']:.2f}"
        gains = (ratio(number(row, name), number(row, "ours")) for name in names[2:4])
        lines.append((*what, *cells(row, names), *gains))
        for place, name in enumerate(names):
            seconds, at = number(row, name, "decode_s"), index + (place - 2) * 0.16
            label, colour = name if index == 0 else None, LAYOUT["colours"][name]
            axes.bar(at, seconds or 0.0, 0.15, color=colour, label=label)
            if seconds is None:
                axes.text(at, 0, " does not fit", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(rows)), [f"{row['shape']}\n{row['name']}" for row in rows], fontsize=8)
    axes.set(ylabel="decode, seconds")
    axes.legend(fontsize=8)
    head = ("shape", "problems", "samples", "examples", "problem", "floor", *names)
    return [_note("problems"), table((*head, "one level / ours", "two levels / ours"), lines)], figure


def parallel(rows: list[Row]) -> Section:
    engine = {row["n"]: row["step_ms"] for row in rows if row["kind"] == "engine"}
    steps, names, lines, levels = [row for row in rows if row["kind"] == "step"], COLUMNS["parallel"], [], None
    for row in sorted(steps, key=itemgetter("n")):
        gained, levels = ratio(number(row, names[2]), number(row, names[1])), row["case"]["levels"]
        what = row["n"], row["batch"], f"{row['floor_ms']:.2f}", *cells(row, names)
        lines.append((*what, gained, f"{engine[row['n']]:.2f}" if row["n"] in engine else "-"))
    requests, prompt = levels[0] if levels else ("some", "some")
    note = _note("parallel", shape=rows[0]["shape"], requests=requests, prompt=prompt)
    figure, axes = _subplots() if steps else (None, [])
    labels = {"xlabel": "samples of each request", "ylabel": "milliseconds between tokens", "title": rows[0]["shape"]}
    for panel in axes:
        _draw(panel, steps, "n", "step_ms", list(engine.items()), "s--", **labels)
    return [note, table(("n", "batch", "floor", *names, "not sharing / sharing", "ours, engine"), lines)], figure


def _subplots(columns: int = 1, rows: int = 1, width: float = 5.2, height: float = 4.0) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, list(axes.flat)


def _draw(axes: Any, rows: list[Row], x: str, y: str, engine: Any = (), style: str = "o-", **labels: str) -> None:
    """A line for each method that any row has, and for the engine in its own style, over a logarithmic axis."""
    lines = {name: [(row[x], number(row, name, y)) for row in rows] for row in rows for name in row["methods"]}
    for name, line in (lines | {"ours, engine": engine}).items():
        if points := sorted(point for point in line if point[1] is not None):
            how = style if name == "ours, engine" else "o-"
            axes.plot(*zip(*points, strict=True), how, ms=4, color=LAYOUT["colours"][name], label=name)
    ticks = sorted({row[x] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{value:,}" for value in ticks], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set(**labels)
    axes.set_ylim(bottom=0)
    if axes.get_subplotspec().is_first_col():
        axes.legend(fontsize=8)


SECTIONS = {"a": throughput, "b": grid, "c": documents, "d": problems, "n": parallel}
