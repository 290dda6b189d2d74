"""The bias that an attention layer adds to its scores, in the rows of a probe."""

from __future__ import annotations

from torch import Tensor

from prefixkit.models.probe.measured import ORDER, ROWS, TOKENS


def bias_fault(
    bias: Tensor | None, asks: bool, measured: bool, length: int | None, cap: float | None, sinks: Tensor | None
) -> str | None:
    """What a layer does that a bias per row and position cannot express; None if nothing.

    Args:
        bias: The bias that the layer adds to its scores.
        asks: Whether the layer asks its cache how long texts are.
        measured: Whether the layer or the model has asked, as masks do in passes that are not over a tree.
        length: Tokens before the rows of the probe; None: the rows are a step over a tree.
        cap, sinks: The arguments that the layer passes to its attention function.
    """
    if asks if bias is None else not measured:
        return "asks how long texts are, or adds to its scores, but not one for the other"
    if bias is None:
        return "has sinks of each row, but no bias" if sinks is not None and sinks.ndim == 2 else None
    tokens = TOKENS if length is None else length + ROWS
    if cap is not None or bias.ndim != 4 or (bias.shape[0], *bias.shape[2:]) != (1, ROWS, tokens):
        return f"adds {list(bias.shape)} to its scores, which are not numbers of each position, or caps them"
    return None


def bias_of_rows(bias: Tensor, length: int | None) -> Tensor:
    """``[1, heads, ROWS, ROWS]`` the bias between all pairs of rows, after ``length`` tokens, or in a step (None)."""
    return bias[..., list(ORDER)] if length is None else bias[..., length:]
