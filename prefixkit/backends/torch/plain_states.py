"""Tokens through layers with states, in plain torch: some rows at a time, so that their states stay in caches.

The host does not wait for the device, so a CUDA graph can capture this.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

# By device type: elements of states that are processed at a time; at least one row's.
_AT_ONCE = {"cpu": 2**18, "cuda": 2**25}


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, source: Tensor, target: Tensor, silu: bool
) -> Tensor:
    """``conv_step``; the op has checked its arguments."""
    inputs = torch.cat([states.index_select(0, source)[..., 1:], x[..., None]], -1)
    states.index_copy_(0, target.clamp(min=0), inputs)
    out = torch.einsum("bcw,cw->bc", inputs.float(), weight.float())
    if bias is not None:
        out += bias.float()
    return (F.silu(out) if silu else out).to(x.dtype).contiguous()


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
    """``mamba2_step``, likewise."""
    inputs, (rows, heads, head_dim), (groups, size) = x.float(), x.shape, inward.shape[1:]
    step = F.softplus(dt.float() if bias is None else dt.float() + bias.float())
    decay = torch.exp(step * rate)[..., None, None]
    # All channels of a group are columns of one product.
    added = (step[..., None] * inputs).view(rows * groups, -1, 1)
    inward, outward = inward.float().reshape(rows * groups, 1, size), outward.float().reshape(rows * groups, size, 1)
    target = target.clamp(min=0)  # the content of slot 0 means nothing
    out = inputs.new_empty(rows * groups, heads // groups * head_dim, 1)
    for some in _some(rows, states):
        now = slice(some.start * groups, some.stop * groups)
        held = states.index_select(0, source[some]).mul_(decay[some])
        columns = held.view(-1, *out.shape[1:2], size).baddbmm_(added[now], inward[now])
        torch.bmm(columns, outward[now], out=out[now])
        states.index_copy_(0, target[some], held)
    y = out.view(x.shape)
    if skip is not None:
        y = torch.addcmul(y, inputs, skip.float()[:, None])
    return (y if gate is None else y * F.silu(gate.float())).to(x.dtype)


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
    """``delta_rule``, likewise."""
    (rows, tokens, heads, dim), size = value.shape, key.shape[3]
    query, key = (of.float().repeat_interleave(heads // of.shape[2], 2) for of in (query, key))
    if normalize:
        query, key = (of * torch.rsqrt((of * of).sum(-1, keepdim=True) + 1e-6) for of in (query, key))
    # [rows, tokens, heads, 1, K or V] each, so that the heads of rows are a batch of products.
    query, key = query[..., None, :] * size**-0.5, key[..., None, :]
    values, decays, beta = value.float()[..., None, :], torch.exp(decay)[..., None, None], beta.float()[..., None, None]
    target = target.clamp(min=0)  # the content of slot 0 means nothing
    out = query.new_empty(rows, tokens, heads, 1, dim)
    for some in _some(rows, states):
        held = states.index_select(0, source[some])
        for token in range(tokens):
            now = some, token
            held.mul_(decays[now])
            change = (values[now] - key[now] @ held).mul_(beta[now])
            held.add_(key[now].mT * change)
            out[now] = query[now] @ held
        states.index_copy_(0, target[some], held)
    return out[..., 0, :].to(value.dtype)


def rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float) -> Tensor:
    """``rms_norm``, likewise."""
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float() + offset, eps)
    return (y if gate is None else y * F.silu(gate.float())).to(x.dtype).contiguous()


def _some(rows: int, states: Tensor) -> Iterator[slice]:
    each = max(1, _AT_ONCE.get(states.device.type, _AT_ONCE["cuda"]) // max(1, states[0].numel()))
    for begin in range(0, rows, each):
        yield slice(begin, min(rows, begin + each))
