"""A run's report as a table."""

from __future__ import annotations

from rich.table import Table

from prefixkit.generation.report import Report


def report_table(report: Report, title: str) -> Table:
    """What was computed, held and read, beside what a plain batch would have."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("prefixkit", "plain batch", "saved"):
        table.add_column(name, justify="right")
    for row in report.rows():
        table.add_row(*row)
    return table


def headline(report: Report) -> str:
    """The run in one line."""
    return (
        f"{report.samples:,} samples of {report.prompts:,} prompts, {report.new_tokens:,} new tokens "
        f"in {report.seconds:.1f} s: {report.tokens_per_second:,.0f} tokens/s"
    )
