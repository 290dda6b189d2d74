"""The report of a JSON of results: the tables and figures of ``docs/hydragen.md``, whose prose stays as it is."""

import math
import re
import textwrap
from operator import itemgetter
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np

from benchmarks.runner import ROOT, Row, geomean, table

BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)  # of the page: what is made anew
FLOORS, SLACK = 1.35, 0.03  # what the aim allows beside the compiled ceiling: of attention's floor, and of all
COLOURS = {"none": "0.6", "none, compiled": "0.3", "flash": "tab:red", "flash, fewer at a time": "lightcoral"}
COLOURS |= {"hydragen": "tab:orange", "hydragen, compiled": "peru", "hydragen, two levels": "tab:olive"}
COLOURS |= {"ours": "tab:blue", "ours, compiled": "navy", "ours, engine": "tab:cyan"}
COLOURS |= {"ours, sharing": "tab:blue", "ours, not sharing": "tab:red"}
Section = tuple[str, Any]  # text, and a figure


def write(result: Row, folder: Path) -> Path:
    """Write ``hydragen.md`` and ``hydragen/*.svg`` into a folder; returns the page's path."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "prefixkit"
    (folder / "hydragen").mkdir(parents=True, exist_ok=True)
    checks, why = result["checks"], ("experiment", "shape", "name", "skipped")
    methods = list(dict.fromkeys(name for found in checks.values() for name in found))
    rows = [(shape, *(found.get(name, "-") for name in methods)) for shape, found in checks.items()]
    missing = [itemgetter(*why)(row) for row in result["rows"] if "skipped" in row]
    parts = {"machine": machine(result), "checks": table(("shape", *methods), rows), "missing": table(why, missing)}
    for letter, section in SECTIONS.items():
        rows = [flat(row) for row in result["rows"] if row["experiment"] == letter and "skipped" not in row]
        if any(row["kind"] in ("step", "grid") for row in rows):
            name, (text, figure) = section.__name__, section(rows)
            figure.savefig(folder / "hydragen" / f"{name}.svg", metadata={"Date": None})
            parts[name] = f"{text}\n\n![{name}](hydragen/{name}.svg)"
    page, prose = folder / "hydragen.md", (ROOT / "docs" / "hydragen.md").read_text()
    page.write_text(BLOCK.sub(lambda at: f"<!-- {at[1]} -->\n\n{parts.get(at[1], '')}\n\n<!-- end -->", prose))
    return page


def machine(result: Row) -> str:
    found, reached = result["machine"], result.get("ceilings") or {}
    known = (f"{name} {value}" for name, value in found.items() if name in ("torch", "cudnn", "driver", "triton"))
    text = f"GPU: {found['gpu']} ({', '.join(known)}). Reached in this run: "
    text += "; ".join(f"{name.replace('_', ' ')} {n}" for name, n in reached.items())
    text += f". It took {result['seconds']:.0f} s in all. Commit {result.get('commit')}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def flat(row: Row) -> Row:
    """With the sizes of its case as columns, and for each method the seconds of prefill and all steps."""
    case, prefill = row.get("case", {}), row.get("prefill_s", 0.0)
    prefix = case["levels"][0][1] if "levels" in case else case.get("prefix")
    for found in row.get("methods", {}).values():
        if "step_ms" in found:
            found["seconds"] = round(prefill + found["step_ms"] * case["new"] / 1e3, 3)
    return row | {"batch": case.get("batch"), "prefix": prefix, "new": case.get("new")}


def number(row: Row, method: str, what: str = "step_ms") -> float:
    """A method's milliseconds of a step, ``tokens_per_s`` or ``seconds``; NaN if it has none."""
    return float(row["methods"].get(method, {}).get(what, math.nan))


def shown(value: float, how: str = "{:.2f}", otherwise: str = "-") -> str:
    return otherwise if math.isnan(value) else how.format(value)


def cells(row: Row, methods: list[str], what: str = "step_ms") -> list[str]:
    """Each method's number, or why there is none, in a word or two."""
    whys = [row["methods"].get(method, {}).get("skipped", "-").split(":")[0][:24] for method in methods]
    return [shown(number(row, method, what), otherwise=why) for method, why in zip(methods, whys, strict=True)]


def throughput(rows: list[Row]) -> Section:
    """Tokens per second over batch, and over prefix, for each shape, where the other is as in most rows."""
    names = ["none", "none, compiled", "flash", "hydragen", "ours", "hydragen, compiled", "ours, compiled"]
    head = ["batch", "prefix", "new", "floor", *names, "aim", "ours, compiled / aim", "hydragen / ours"]
    head += ["ours over flash", "flash tokens/s", "hydragen", "ours", "ours, compiled"]
    by_shape: dict[str, list[Row]] = {}
    for row in (row for row in rows if row["kind"] == "step"):
        by_shape.setdefault(row["shape"], []).append(row)
    (figure, axes), parts = _subplots(2, len(by_shape)), []
    for index, (shape, steps) in enumerate(by_shape.items()):
        lines = []
        for row in sorted(steps, key=itemgetter("prefix", "new", "batch")):
            rates = [number(row, name, "tokens_per_s") for name in ("flash", "hydragen", "ours", "ours, compiled")]
            if math.isnan(rates[0]):
                rates[0] = number(row, "flash, fewer at a time", "tokens_per_s")
            aim = (number(row, "none, compiled") + FLOORS * row["floor_ms"]) * (1 + SLACK)
            gains = [number(row, "ours, compiled") / aim, number(row, "hydragen") / number(row, "ours")]
            gains = [shown(gain, "{:.2f}x") for gain in (*gains, rates[2] / rates[0])]
            line = [row["batch"], row["prefix"], row["new"], shown(row["floor_ms"]), *cells(row, names), shown(aim)]
            lines.append([*line, *gains, *(shown(rate, "{:,.0f}") for rate in rates)])
        parts += [f"{shape}:", table(head, lines)]
        mine = [row for row in steps if row["new"] == mode(row["new"] for row in steps)]
        for panel, over, fixed in zip(axes[2 * index :], ("batch", "prefix"), ("prefix", "batch"), strict=False):
            usual = mode(row[fixed] for row in mine)
            drawn, label = [row for row in mine if row[fixed] == usual], {"prefix": "prefix, tokens"}.get(over, over)
            _draw(panel, drawn, over, "tokens_per_s", label, "tokens/s", f"{shape}, {fixed} {usual:,}")
    whole = []
    for row in (row for row in rows if row["kind"] != "step"):
        runs = {"ours, engine": row.get("ours"), "ours, engine, compiled": row.get("compiled"), row.get("what"): row}
        where = row["batch"], row["prefix"], shown(row["prefill_s"])
        ran = [(name, found["tokens_per_s"]) for name, found in runs.items() if found and "tokens_per_s" in found]
        whole += [(row["shape"], name, *where, f"{rate:,.0f}") for name, rate in ran]
    parts += ["Whole runs:", table(("shape", "what", "batch", "prompt", "prefill s", "tokens/s"), whole)]
    return "\n\n".join(parts), figure


def grid(rows: list[Row]) -> Section:
    """A heat map of speed-ups over flash for each method and suffix."""
    figure, panels = _subplots(2, len(rows), width=4.6, height=3.2)
    grids = [(row, of) for row in sorted(rows, key=itemgetter("heads", "suffix")) for of in ("hydragen", "ours")]
    lines = []
    for axes, (row, method) in zip(panels, grids, strict=True):
        points = [{n: x if isinstance(x, float | int) else math.nan for n, x in of.items()} for of in row["points"]]
        gains = {(of["prefix"], of["batch"]): of["flash"] / of[method] for of in points}
        over, heads = [of[method] / of["floor_us"] for of in points], "/".join(map(str, row["heads"]))
        known, over = ([value for value in of if value == value] for of in (gains.values(), over))
        numbers = shown(geomean(known), "{:.2f}x"), shown(max(known, default=math.nan), "{:.1f}x"), shown(geomean(over))
        lines.append((heads, row["suffix"], method, len(known), *numbers))
        prefixes, batches = (sorted(set(each)) for each in zip(*gains, strict=True))
        values = np.array([[gains[prefix, batch] for prefix in prefixes] for batch in batches])
        axes.imshow(np.log2(values), cmap="RdYlGn", vmin=-5, vmax=5, aspect="auto", origin="lower")
        for (y, x), value in np.ndenumerate(values):
            if value == value:
                colour = "w" if abs(np.log2(value)) > 3.5 else "k"
                axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(prefixes)), [f"{prefix:,}" for prefix in prefixes])
        axes.set_yticks(range(len(batches)), [f"{batch:,}" for batch in batches])
        axes.set(xlabel="prefix", ylabel="batch", title=f"{method} over flash, heads {heads}, suffix {row['suffix']}")
        axes.title.set_fontsize(9)
    head = ("heads", "suffix", "method", "points", "speed-up, geometric mean", "most", "time / floor")
    return table(head, lines), figure


def document(rows: list[Row]) -> Section:
    rows, names = sorted(rows, key=itemgetter("batch")), ["none", "flash", "hydragen", "ours"]
    lines = [(row["batch"], *cells(row, names, "seconds"), shown(row["engine"]["seconds"])) for row in rows]
    (figure, (axes,)), engine = _subplots(), [(row["batch"], row["engine"]["seconds"]) for row in rows]
    title = "{prefix:,} tokens, {shape}".format(**rows[0])
    _draw(axes, rows, "batch", "seconds", "questions", "seconds", title, engine)
    note = "{shape}, a document of {prefix:,} tokens, prefilled in {prefill_s:.2f} s, questions of {question_tokens} "
    note = (note + "tokens, {new} new tokens each:\n\n").format(**rows[0])
    return note + table(("questions", *names, "ours, engine"), lines), figure


def problems(rows: list[Row]) -> Section:
    names, lines = ["none", "flash", "hydragen", "hydragen, two levels", "ours"], []
    figure, (axes,) = _subplots(width=max(5.2, 2.6 * len(rows)))
    rows = sorted(rows, key=itemgetter("shape", "batch"))
    for index, row in enumerate(rows):
        (_, shots), (count, tokens) = row["case"]["levels"]
        gains = (shown(number(row, name) / number(row, "ours"), "{:.2f}x") for name in names[2:4])
        what = row["shape"], count, row["batch"] // count, shots, tokens, shown(row["floor_ms"])
        lines.append((*what, *cells(row, names), *gains))
        for place, name in enumerate(names):
            seconds, at = number(row, name, "seconds"), index + (place - 2) * 0.16
            axes.bar(at, np.nan_to_num(seconds), 0.15, color=COLOURS[name], label=None if index else name)
            if math.isnan(seconds):
                axes.text(at, 0, " does not fit", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(rows)), [f"{row['shape']}\n{row['name']}" for row in rows], fontsize=8)
    axes.set(ylabel="decode, seconds")
    axes.legend(fontsize=8)
    head = ("shape", "problems", "samples", "examples", "problem", "floor", *names)
    return table((*head, "one level / ours", "two levels / ours"), lines), figure


def parallel(rows: list[Row]) -> Section:
    engine = {row["n"]: row["step_ms"] for row in rows if row["kind"] == "engine"}
    steps = sorted((row for row in rows if row["kind"] == "step"), key=itemgetter("n"))
    (figure, (axes,)), lines = _subplots(), []
    names = ["none", "ours, sharing", "ours, not sharing", "hydragen"]
    for row in steps:
        gained = shown(number(row, names[2]) / number(row, names[1]), "{:.2f}x")
        what = row["n"], row["batch"], shown(row["floor_ms"]), *cells(row, names), gained
        lines.append((*what, shown(engine.get(row["n"], math.nan))))
    labels = "samples of each request", "milliseconds between tokens", rows[0]["shape"]
    _draw(axes, steps, "n", "step_ms", *labels, engine=list(engine.items()), style="s--")
    head = ("n", "batch", "floor", *names, "not sharing / sharing", "ours, engine")
    requests, prompt = steps[0]["case"]["levels"][0]
    note = f"{rows[0]['shape']}, {requests} requests at a time with prompts of {prompt} tokens:\n\n"
    return note + table(head, lines), figure


def _subplots(columns: int = 1, rows: int = 1, width: float = 5.2, height: float = 4.0) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    size = {"figsize": (width * columns, height * rows), "layout": "constrained", "squeeze": False}
    figure, axes = pyplot.subplots(rows, columns, **size)
    return figure, list(axes.flat)


def _draw(
    axes: Any, rows: list[Row], x: str, y: str, xlabel: str, ylabel: str, title: str, engine=(), style="o-"
) -> None:
    """A line for each method that any row has, and for the engine in its own style, over a logarithmic axis."""
    lines = {name: [(row[x], number(row, name, y)) for row in rows] for row in rows for name in row["methods"]}
    for name, line in (lines | {"ours, engine": engine}).items():
        if points := sorted(point for point in line if not math.isnan(point[1])):
            how = style if name == "ours, engine" else "o-"
            axes.plot(*zip(*points, strict=True), how, ms=4, color=COLOURS[name], label=name)
    ticks = sorted({row[x] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{value:,}" for value in ticks], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.set_ylim(bottom=0)
    if axes.get_subplotspec().is_first_col():
        axes.legend(fontsize=8)


SECTIONS = {"a": throughput, "b": grid, "c": document, "d": problems, "n": parallel}
