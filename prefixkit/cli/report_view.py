"""A run's report as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from prefixkit.cli.terminal import line
from prefixkit.engine.report import Report


def show_report(report: Report, title: str, console: Console) -> None:
    """What was computed, held and read, beside what a plain batch would have."""
    table = Table()
    table.add_column()
    for name in ("prefixkit", "plain batch", "saved"):
        table.add_column(name, justify="right")
    for row in report.rows():
        table.add_row(*map(line, row))
    console.print(line((title, "bold")))
    console.print(table)


def headline(report: Report) -> str:
    """The run in one line."""
    return (
        f"{report.samples:,} samples of {report.prompts:,} prompts, {report.new_tokens:,} new tokens "
        f"in {report.seconds:.1f} s: {report.tokens_per_second:,.0f} tokens/s"
    )
