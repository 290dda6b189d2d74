"""Numbers as text, in the form of the report."""

from __future__ import annotations

from prefixkit.evaluation.report.pass_at_k import Point

_DURATIONS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def percent(share: float) -> str:
    """A share in percent: one decimal, two decimals close to 0% and 100%, none at these two."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.0001:
        return "<0.01%"
    if share > 0.9999:
        return ">99.99%"
    return f"{share:.2%}" if share < 0.01 or share > 0.99 else f"{share:.1%}"


def interval(point: Point) -> str:
    """The bounds of a point, as ``26.0% to 37.2%``."""
    return f"{percent(point.low)} to {percent(point.high)}"


def count(number: float | None) -> str:
    """A number with separators for thousands; a dash where it is unknown."""
    return "-" if number is None else f"{number:,.0f}"


def short(number: float) -> str:
    """A number in few characters, as 12.5k."""
    for unit, letter in _COUNTS:
        if abs(number) >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def bytes_of(size: float) -> str:
    """A size in the largest binary unit of which it has at least one."""
    unit = 0
    while abs(size) >= 1024 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_BYTES[unit]}" if unit else f"{size:.0f} bytes"


def duration(seconds: float) -> str:
    """A time in the largest unit of which it has at least one."""
    for length, unit in _DURATIONS:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for an axis that ends at ``seconds``: its length in seconds, and its name."""
    for length, unit in _DURATIONS:
        if seconds >= 3 * length:
            return length, unit
    return 1.0, "s"


def plural(number: int, noun: str) -> str:
    """``1 problem``, ``2 problems``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
