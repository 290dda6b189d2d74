"""The contracts of ops that advance layers' states by tokens, in the slots of a pool (see ``library``).

Slots are those of ``kv.state_pool``: row ``r`` reads slot ``source[r]`` and writes slot ``target[r]``, which may be the
same.  With target -1 a row writes nothing that is read again.  Slot 0 is for rows that pad a captured graph's batch:
its content, and the result of a row with target 0, mean nothing.  Except for slot 0, no row writes a slot that another
row reads or writes.  The CPU raises IndexError if a slot does not exist, and ValueError if rows break this rule;
a GPU does so with ``PREFIXKIT_CHECK=1``, and otherwise treats rows whose slots do not exist as padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixkit.checking import checked
from prefixkit.ops.arguments import FLOATS, capturing, expect


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, source: Tensor, target: Tensor, silu: bool
) -> Tensor:
    """One token through a depthwise causal convolution whose state is its last ``width`` inputs.

    Sums are float32 and rounded once.

    Args:
        x: ``[B, channels]``.
        weight: ``[channels, width]``, contiguous, in x's dtype, as are bias and states.
        bias: ``[channels]``, contiguous, or None.
        states: ``[slots, channels, width]``, contiguous, the oldest input first; written.
        source, target: ``[B]`` int64, contiguous; see above.
        silu: Whether ``y * sigmoid(y)`` is returned instead of ``y``.

    Returns:
        ``[B, channels]``, contiguous.

    Raises:
        BadShape, BadDtype, BadDevice: an argument does not fit the others.
        IndexError, ValueError, NoBackward: slots do not exist, or a row writes another row's slot, see above;
            a gradient is recorded.
    """
    op = "conv_step"
    expect(op, "x", x, "[B, channels]", x.ndim == 2, FLOATS)
    channels, like = x.shape[1], " like x"
    fits = weight.ndim == 2 and weight.shape[0] == channels and weight.is_contiguous()
    expect(op, "weight", weight, f"[{channels}, width], contiguous", fits, (x.dtype,), x.device, like)
    if bias is not None:
        fits = bias.shape == (channels,) and bias.is_contiguous()
        expect(op, "bias", bias, f"[{channels}], contiguous", fits, (x.dtype,), x.device, like)
    fits = states.ndim == 3 and states.shape[1:] == weight.shape and states.is_contiguous()
    shape = f"[slots, {channels}, {weight.shape[1]}] (channels and width of weight), contiguous"
    expect(op, "states", states, shape, fits, (x.dtype,), x.device, like)
    _check_slots(op, x, source, target)
    return x.new_empty(x.shape)


def mamba2_step(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    inward: Tensor,
    outward: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    states: Tensor,
    source: Tensor,
    target: Tensor,
) -> Tensor:
    """One token through the recurrence of Mamba 2 (arXiv:2405.21060, section 7).

    With ``s = softplus(dt + bias)`` of each head: ``h = exp(s * rate) * h + (s * x) (outer) inward``, and ``y = h .
    outward + skip * x``, times ``silu(gate)`` if there is a gate.  Computed in float32, and rounded once.

    Args:
        x: ``[B, heads, head_dim]``.
        dt: ``[B, heads]``, float32, bfloat16 or float16; ``skip`` and ``bias`` likewise.
        rate: ``[heads]`` float32: A.
        inward: ``[B, groups, state_size]`` in x's dtype: B; ``heads / groups`` consecutive heads share a group.
        outward: C, of the same shape and dtype.
        skip: ``[heads]``: D; None for 0.
        bias: ``[heads]``; None for 0.
        gate: Like ``x``, or None.
        states: ``[slots, heads, head_dim, state_size]`` float32, contiguous, written.
        source, target: ``[B]`` int64, contiguous; see above.

    Returns:
        ``[B, heads, head_dim]`` in x's dtype, contiguous.

    Raises:
        BadShape, BadDtype, BadDevice, IndexError, ValueError, NoBackward: as ``conv_step``.
    """
    op, device, like = "mamba2_step", x.device, " like x"
    expect(op, "x", x, "[B, heads, head_dim]", x.ndim == 3, FLOATS)
    rows, heads, head_dim = x.shape
    expect(op, "dt", dt, f"[{rows}, {heads}] (B and heads of x)", dt.shape == (rows, heads), FLOATS, device)
    expect(op, "rate", rate, f"[{heads}] (heads of x)", rate.shape == (heads,), (torch.float32,), device)
    fits = inward.ndim == 3 and inward.shape[0] == rows and inward.shape[1] > 0 and heads % inward.shape[1] == 0
    expect(op, "inward", inward, f"[{rows}, a divisor of {heads}, state_size]", fits, (x.dtype,), device, like)
    expect(op, "outward", outward, list(inward.shape), outward.shape == inward.shape, (x.dtype,), device, like)
    for name, tensor in (("skip", skip), ("bias", bias)):
        if tensor is not None:
            expect(op, name, tensor, f"[{heads}] (heads of x)", tensor.shape == (heads,), FLOATS, device)
    if gate is not None:
        expect(op, "gate", gate, list(x.shape), gate.shape == x.shape, (x.dtype,), device, like)
    fits = states.ndim == 4 and states.shape[1:] == (heads, head_dim, inward.shape[2]) and states.is_contiguous()
    shape = f"[slots, {heads}, {head_dim}, {inward.shape[2]}] (of x and inward), contiguous"
    expect(op, "states", states, shape, fits, (torch.float32,), device)
    _check_slots(op, x, source, target)
    return x.new_empty(x.shape)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    normalize: bool,
    states: Tensor,
    source: Tensor,
    target: Tensor,
) -> Tensor:
    """Tokens of each row, one after another, through the gated delta rule (arXiv:2412.06464, section 3.1).

    Of each head of a row, with the state ``S``: ``S = exp(decay) * S``; ``S = S + key (outer) beta * (value - key .
    S)``; ``y = query . S / sqrt(K)``.  Computed in float32, and rounded once.

    Args:
        query, key: ``[B, tokens, key_heads, K]`` in value's dtype; ``heads / key_heads`` consecutive heads share one.
        value: ``[B, tokens, heads, V]``.
        decay: ``[B, tokens, heads]`` float32 logarithms.
        beta: ``[B, tokens, heads]``, float32, bfloat16 or float16.
        normalize: Whether query and key are multiplied by ``1 / sqrt(sum of squares + 1e-6)``.
        states: ``[slots, heads, K, V]`` float32, contiguous, written.
        source, target: ``[B]`` int64, contiguous; see above.

    Returns:
        ``[B, tokens, heads, V]`` in value's dtype, contiguous.

    Raises:
        BadShape, BadDtype, BadDevice, IndexError, ValueError, NoBackward: as ``conv_step``.
    """
    op, device, like = "delta_rule", value.device, " like value"
    expect(op, "value", value, "[B, tokens, heads, V]", value.ndim == 4, FLOATS)
    rows, tokens, heads, dim = value.shape
    fits = key.ndim == 4 and key.shape[:2] == (rows, tokens) and key.shape[2] > 0 and heads % key.shape[2] == 0
    expect(op, "key", key, f"[{rows}, {tokens}, a divisor of {heads}, K]", fits, (value.dtype,), device, like)
    expect(op, "query", query, list(key.shape), query.shape == key.shape, (value.dtype,), device, like)
    for name, tensor, dtypes in (("decay", decay, (torch.float32,)), ("beta", beta, FLOATS)):
        fits = tensor.shape == (rows, tokens, heads)
        expect(op, name, tensor, f"[{rows}, {tokens}, {heads}] (of value)", fits, dtypes, device)
    fits = states.ndim == 4 and states.shape[1:] == (heads, key.shape[3], dim) and states.is_contiguous()
    shape = f"[slots, {heads}, {key.shape[3]}, {dim}] (of value and key), contiguous"
    expect(op, "states", states, shape, fits, (torch.float32,), device)
    _check_slots(op, value, source, target)
    return value.new_empty(value.shape)


def rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float) -> Tensor:
    """A norm by the root mean square (arXiv:1910.07467), as layers have it beside their states.

    ``x / sqrt(mean(x * x) + eps) * (weight + offset)`` of each row, times ``silu(gate)`` if there is a gate.  Computed
    in float32, and rounded once.

    Args:
        x: ``[..., dim]``.
        weight: ``[dim]``, contiguous, float32, bfloat16 or float16.
        gate: Like ``x``, or None.
        eps: Added to the mean.
        offset: Added to weights.

    Returns:
        Like ``x``, contiguous.

    Raises:
        BadShape, BadDtype, BadDevice, NoBackward: as ``conv_step``.
    """
    op, device = "rms_norm", x.device
    expect(op, "x", x, "[..., dim]", x.ndim > 0 and x.shape[-1] > 0, FLOATS)
    fits = weight.shape == x.shape[-1:] and weight.is_contiguous()
    expect(op, "weight", weight, f"[{x.shape[-1]}], contiguous", fits, FLOATS, device)
    if gate is not None:
        expect(op, "gate", gate, list(x.shape), gate.shape == x.shape, (x.dtype,), device, " like x")
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def _check_slots(op: str, x: Tensor, source: Tensor, target: Tensor) -> None:
    for name, slots in (("source", source), ("target", target)):
        fits = slots.shape == x.shape[:1] and slots.is_contiguous()
        expect(op, name, slots, f"[{x.shape[0]}] (rows of x), contiguous", fits, (torch.int64,), x.device)


def check_conv_step(*given: Any) -> None:
    """The checks of ``conv_step`` before any backend runs it: that its arguments fit each other, and of its slots."""
    conv_step(*given)
    _check_moves("conv_step", *given[3:6])


def check_mamba2_step(*given: Any) -> None:
    """The same checks for ``mamba2_step``."""
    mamba2_step(*given)
    _check_moves("mamba2_step", *given[-3:])


def check_delta_rule(*given: Any) -> None:
    """The same checks for ``delta_rule``."""
    delta_rule(*given)
    _check_moves("delta_rule", *given[-3:])


def _check_moves(op: str, states: Tensor, source: Tensor, target: Tensor) -> None:
    """IndexError: a slot does not exist.  ValueError: a row writes a slot that another row reads or writes."""
    if (states.device.type != "cpu" and not checked()) or capturing(states) or not len(source):
        return
    read, written, slots = source.cpu().numpy(), target.cpu().numpy(), states.shape[0]
    low, high = int(read.min()), int(max(read.max(), written.max()))
    if low < 0 or int(written.min()) < -1 or high >= slots:
        raise IndexError(
            f"{op}: slots of states must be 0..{slots - 1}, and targets may be -1, got sources {read.tolist()} and "
            f"targets {written.tolist()}"
        )
    rows = np.flatnonzero(written > 0)
    kept = written[rows]
    if len(np.unique(kept)) < len(kept):
        raise ValueError(f"{op}: two rows write one slot: {written.tolist()}; each needs a slot of its own")
    others = read.copy()
    others[rows] = np.where(read[rows] == kept, 0, read[rows])  # a row may write the slot that it has read
    if np.isin(others[others > 0], kept).any():
        raise ValueError(
            f"{op}: a row writes a slot that another one reads: sources {read.tolist()}, targets {written.tolist()}"
        )
