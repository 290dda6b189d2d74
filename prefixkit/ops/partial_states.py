"""Partial states: attention of queries over some of their keys, and how partial states merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """Attention of some queries over some keys.

    Attributes:
        out: ``[rows, heads, v_dim]`` float32 mean of the values, weighted by the softmax.
        lse: ``[rows, heads]`` float32 natural logarithm of the softmax's denominator, of the scaled and modified
            scores.
    """

    out: Tensor
    lse: Tensor


def merge_parts(parts: Sequence[State], may_be_empty: bool, sinks: Tensor | None) -> State:
    """Merge partial states; each holds the first rows only, as many as it has.

    A row's weights are divided by their own sum, not by the exponential of the rounded log-sum-exp, so they add up to
    1.  Sinks are added to the same sum: merging them later would round the log-sum-exp once more, an error of up to
    half a unit in its last place.
    """
    top = parts[0].lse.clone() if sinks is None else torch.maximum(parts[0].lse, sinks)
    for part in parts[1:]:
        head = _first(top, part.lse.shape[0])
        torch.maximum(head, part.lse, out=head)
    if may_be_empty:
        top.masked_fill_(top == -math.inf, 0.0)  # -inf minus -inf would be NaN
    weights = [torch.sub(part.lse, _first(top, part.lse.shape[0])).exp_() for part in parts]
    total = weights[0].clone()
    for weight in weights[1:]:
        _first(total, weight.shape[0]).add_(weight)
    if sinks is not None:
        total.add_(torch.exp(sinks - top))
    lse = top.add_(total.log())
    if may_be_empty:
        total.masked_fill_(total == 0, 1.0)
    out = parts[0].out * weights[0].div_(total).unsqueeze(-1)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        rows = weight.shape[0]
        _first(out, rows).addcmul_(part.out, weight.div_(_first(total, rows)).unsqueeze(-1))
    return State(out, lse)


def merge_rows(parts: Sequence[tuple[State, Tensor | None]], num_rows: int) -> State:
    """Merge states that each have some of ``num_rows`` queries.

    Row ``i`` of a state belongs to query ``rows[i]``, int64; None: the state has all queries, in order.
    """
    whole = [state if rows is None else _spread(state, rows, num_rows) for state, rows in parts]
    return whole[0] if len(whole) == 1 else merge_parts(whole, may_be_empty=True, sinks=None)


def _spread(state: State, rows: Tensor, num_rows: int) -> State:
    """The state extended to all queries: empty for those that it does not have."""
    out = state.out.new_zeros(num_rows, *state.out.shape[1:]).index_copy_(0, rows, state.out)
    lse = state.lse.new_full((num_rows, state.lse.shape[1]), -math.inf).index_copy_(0, rows, state.lse)
    return State(out, lse)


def _first(tensor: Tensor, count: int) -> Tensor:
    return tensor if count == tensor.shape[0] else tensor.narrow(0, 0, count)
