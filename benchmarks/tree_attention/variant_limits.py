"""Limits on the times and errors of variants, and the figures of a row that exceed them."""

from __future__ import annotations

from typing import Any

from benchmarks.runner import Row

Limits = dict[str, float]
EXACT, APPROXIMATE = 1.7, 1.35  # limits for prompts whose scores go through tanh
OF_SCORES = {"alibi": 1.2, "soft-cap": EXACT, "sigmoid": EXACT, "soft-cap + window": EXACT}
OF_SCORES |= {"soft-cap approximate": APPROXIMATE, "sigmoid approximate": APPROXIMATE}
NEIGHBORHOODS, OTHERS = 1.3, 1.15
ERRORS = {"over_best": 1.05, "lse_over_best": 1.05}
FIRST_USE_S = 10.0


def limits_of(name: str, is_prompt: bool, is_windowed: bool) -> Limits:
    """The limits on figures of a variant's time, by their names in a row.

    NATTEN's time is compared with its share of the blocks, windows' times with the blocks or tokens that they read.
    """
    limits = {"over_flex": 1.0}
    if name.startswith("natten"):
        return limits | {"over_blocks": NEIGHBORHOODS}
    most = OF_SCORES.get(name, OTHERS) if is_prompt else OTHERS
    if is_windowed:
        return limits | {"over_blocks": most, "over_kv": most}
    return limits | {"over_base": most}


def above_limits(row: Row, limits: Limits) -> dict[str, list[float]]:
    """Each figure of a row of times that is above its limit: ``[figure, limit]``; missing figures are skipped."""
    figures: dict[str, Any] = {name: row.get(name) for name in limits}
    figures["first_use_s"] = row.get("first_use_s", {}).get("ours")
    counts = row.get("compilations", {})
    again = {who: counts[who] for who in ("ours, new numbers", "ours, new shape") if who in counts}
    most = {**limits, "first_use_s": FIRST_USE_S, **dict.fromkeys(again, 0)}
    return {
        name: [figure, most[name]]
        for name, figure in (figures | again).items()
        if figure is not None and figure > most[name]
    }


def above_errors(row: Row) -> dict[str, list[float]]:
    """The same for a row of errors."""
    return {name: [row[name], most] for name, most in ERRORS.items() if row.get(name, 0.0) > most}
