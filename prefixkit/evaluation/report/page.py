"""The page: one HTML file with its style, its figures and a small script inside, which loads nothing from elsewhere.

Every text goes through :func:`~prefixkit.evaluation.report.shown.visible` and is then escaped by Jinja2, or is in a
payload (:mod:`~prefixkit.evaluation.report.payloads`), from which the script makes text nodes; the page's own content
security policy admits its style and its script by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from prefixkit.evaluation.report import numbers
from prefixkit.evaluation.report.curves import best_at, curves_of, last_k
from prefixkit.evaluation.report.figures import MOST_BANDS, NARROW, WIDE, curve_figure, progress_figures
from prefixkit.evaluation.report.icicle import icicle, outline, said
from prefixkit.evaluation.report.pass_at_k import Curve
from prefixkit.evaluation.report.payloads import beginning_of, payload_of_beginning, payloads
from prefixkit.evaluation.report.run_summary import OUTCOMES, Facts
from prefixkit.evaluation.report.shown import code, cut_end, visible
from prefixkit.evaluation.report.verdict_figures import (
    CELL,
    FEW,
    MANY,
    outcome_lines,
    problem_rows,
    segments,
)

LONGEST_SETTING = 4000  # characters of a parameter or a command that are shown
LONGEST_ID = 60  # characters of a problem's id that are shown
_SCRIPTS = ("diff.js", "table.js", "programs.js")
FEW_PROBLEMS = 10  # with fewer, an interval over problems is rough


def render_page(facts: Facts) -> str:
    """The whole page."""
    style, script = _own("style.css"), '"use strict";\n' + "".join(map(_own, _SCRIPTS))
    found = curves_of(facts)
    rows = problem_rows(facts)
    beginning = beginning_of(facts.problems)
    widths = (("wide", WIDE), ("narrow", NARROW))
    return (
        _environment()
        .get_template("page.html")
        .render(
            facts=facts,
            style=Markup(style),
            script=Markup(script),
            policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'",
            headline=_headline(facts, found),
            curves=found,
            curve_figures=[(name, curve_figure(found, width)) for name, width in widths if last_k(found) > 1],
            curve_notes=_notes(found),
            rows=rows,
            payloads=dict(enumerate(payloads(facts.problems, beginning), 1)),
            beginning=payload_of_beginning(beginning) if beginning else "",
            program_facts=_program_facts(facts, bool(beginning)),
            size="few" if len(rows) <= FEW else "many" if len(rows) > MANY else "some",
            cell=CELL,
            outcomes=outcome_lines(facts.counts),
            bars=[(name, width, segments(facts.counts, width)) for name, width in widths],
            saved=_saved(facts),
            pictures=[
                ([(name, icicle(one, width)) for name, width in widths], one.title, *outline(one.roots))
                for one in facts.pictures
            ],
            progress=[(name, progress_figures(facts.progress, width)) for name, width in widths],
            run_time=_run_time(facts),
            settings=[("Parameters", facts.parameters), ("Versions", facts.versions)],
            longest_setting=LONGEST_SETTING,
        )
    )


def _program_facts(facts: Facts, beginning: bool) -> Markup:
    """Facts about all problems for the script, as JSON that cannot end an HTML element."""
    groups = [visible(group.label, LONGEST_ID) for group in facts.groups]
    record = {"outcomes": list(OUTCOMES), "groups": groups, "beginning": beginning}
    return Markup(json.dumps(record).replace("<", "\\u003c"))


def _headline(facts: Facts, found: tuple[Curve, ...]) -> list[tuple[str, str, str]]:
    """``(what, number, remark)`` of the numbers at the top of the page."""
    items = []
    for k in sorted({1, last_k(found)} - {0}):
        if best := best_at(found, k):
            label, point = best
            at = f", best of {len(found)} groups: {label}" if len(found) > 1 else f", {label}" if label else ""
            items.append((f"pass@{k:,}", numbers.percent(point.estimate), f"95%: {numbers.interval(point)}{at}"))
    if problems := facts.judged_problems:
        without = len(facts.problems) - problems
        remark = "by at least one sample" + (f"; {without:,} without verdicts" if without else "")
        items.append(("problems solved", f"{facts.solved:,} of {problems:,}", remark))
    unjudged = facts.counts["unjudged"]
    remark = f"{unjudged:,} not judged" if unjudged else "all judged"
    items.append(
        ("samples", numbers.count(facts.samples), f"of {numbers.plural(len(facts.problems), 'problem')}; {remark}")
    )
    if facts.tokens_per_second is not None:
        remark = f"{numbers.short(facts.new_tokens)} tokens in {numbers.duration(facts.seconds)}"
        items.append(("tokens/s", numbers.count(facts.tokens_per_second), remark))
    return items


def _notes(found: tuple[Curve, ...]) -> list[str]:
    """Notes that a reader of the intervals needs."""
    points = [point for curve in found for point in curve.points]
    if not points:
        return []
    notes = [_interval_note(max(point.problems for point in points))]
    if len(found) > 1:
        notes.append("Each group has a curve of its own; the number of the headline is the best group's.")
    if len(found) > MOST_BANDS:
        notes.append("The intervals of so many groups are in the table only.")
    if left_out := max(point.left_out for point in points):
        notes.append(f"{numbers.plural(left_out, 'problem')} without enough judged samples left out of the means.")
    last = last_k(found)
    notes.append(f"The curves end at k = {last:,}, the fewest judged samples of a problem that has any.")
    return notes


def _interval_note(problems: int) -> str:
    if problems == 1:
        return (
            "With one problem, the interval is Wilson's for its pass rate: it covers which samples were drawn, "
            "and says nothing of other problems."
        )
    note = (
        "The intervals are 95% bootstrap intervals over problems: they cover which problems were asked and which "
        "samples were drawn. Where all problems have equal values, they are Wilson's, with problems as trials."
    )
    return note + " Of fewer than ten problems they are rough." * (problems < FEW_PROBLEMS)


def _saved(facts: Facts) -> list[str]:
    """The savings, in words."""
    saved = facts.saved
    said = []
    if saved.tokens is not None:
        said.append(f"{numbers.count(saved.tokens)} tokens not computed")
    if saved.kv_bytes is not None:
        said.append(f"{numbers.bytes_of(saved.kv_bytes)} of KV not held at the fullest moment")
    if saved.seconds is not None:
        said.append(f"{numbers.duration(saved.seconds)} saved, estimated")
    return said


def _run_time(facts: Facts) -> str:
    starts = [moments for moments in facts.progress if moments]
    if not starts:
        return ""
    stops = len(starts) - 1
    stopped = f" The run was stopped {numbers.plural(stops, 'time')}, where the figures are shaded." if stops else ""
    return f"From the first start to the last moment, {numbers.duration(starts[-1][-1].seconds)} of wall time.{stopped}"


@lru_cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("prefixkit.evaluation.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bare": lambda share: numbers.percent(share).removesuffix("%"),
        "brief": lambda text: visible(text, LONGEST_ID),
        "code": code,
        "count": numbers.count,
        "head": cut_end,
        "percent": numbers.percent,
        "places": Markup,  # points of a line, which are numbers
        "plural": numbers.plural,
        "said": said,
    }
    return environment


def _harmless(value: Any) -> Any:
    """A value as the template writes it: texts become one visible line; HTML that prefixkit made stays as it is."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@lru_cache
def _own(name: str) -> str:
    return resources.files("prefixkit.evaluation.report").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The name of a style or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
