"""The result of a layer's eager attention function, compared with that of attention over a tree."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.models.attention_class import original_class
from prefixkit.models.own_attention.known import own_code


def eager_error(
    module: nn.Module,
    attended: tuple[Tensor, Tensor, Tensor],
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> float | None:
    """The difference beyond rounding of the function and ``softmax(scale q k) v`` for rows of one text, or None.

    Args:
        module: The attention module.
        attended: Query, keys and values ``[1, heads, rows, size]``.
        scale, window, cap: The arguments that the module passes to its attention function.
        sinks: ``[heads]``, or ``[rows, heads]`` for each row.
        bias: ``[1, heads, rows, rows]`` the bias added to scores.
    """
    eager = inspect.unwrap(original_class(module).forward).__globals__.get("eager_attention_forward")
    own = own_code(original_class(module))  # type: ignore[arg-type]  # classes hash
    if eager is None or own is not None:  # own code is compared as a whole
        return None
    query, key, value = attended
    rows, at = query.shape[2], torch.arange(query.shape[2], device=query.device)
    hidden = at > at[:, None]
    if window is not None:
        hidden |= at <= at[:, None] - window
    mask = torch.zeros(1, 1, rows, rows, dtype=query.dtype, device=query.device)
    mask.masked_fill_(hidden, torch.finfo(query.dtype).min)
    others: dict[str, Any] = {"sliding_window": window, "softcap": cap, "position_bias": bias}
    if sinks is not None:
        by_row = sinks.T[None, ..., None] if sinks.ndim == 2 else sinks[None, :, None, None].expand(1, -1, rows, 1)
        others |= {"s_aux": sinks} if sinks.ndim == 1 else {"sinks": by_row}
    given = {name: one for name, one in others.items() if one is not None}
    theirs = eager(module, query, key, value, mask, scaling=scale, dropout=0.0, **given)[0].double()
    q, k, v = (of.double() for of in attended)
    k, v = (of.repeat_interleave(q.shape[1] // of.shape[1], 1) for of in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if bias is not None:
        scores = scores + bias.double()
    # Products are rounded before the softmax, which runs in float32; weights and values are rounded after it.
    eps = max(torch.finfo(dtype).eps for dtype in (smaller(key, value), torch.float32))
    allowed = eps * (16 + 4 * scores.abs().max()) * v.abs().max()
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, by_row.double()], 3)
    ours = (scores.softmax(3)[..., :rows] @ v).transpose(1, 2)
    if theirs.shape != ours.shape:
        return float("inf")
    error = (theirs - ours).abs().max()
    return None if error <= allowed else float(error)


def smaller(k: Tensor, v: Tensor) -> torch.dtype:
    """The smaller dtype: under autocast, keys rotated in float32 are rounded to the values' dtype when used."""
    return min(k.dtype, v.dtype, key=lambda dtype: dtype.itemsize)
