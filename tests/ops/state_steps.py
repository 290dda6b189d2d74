"""Calls of the ops that take states further, in random sizes, and their float64 oracles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SLOTS = 9
DRAWS = 8  # of random numbers, over which errors are added up: of float32 those of a few numbers say little


@dataclass(frozen=True)
class Step:
    """What an op returns and the states after it, in float64."""

    out: Tensor
    states: Tensor

    def errors(self, exact: Step, target: Tensor) -> Tensor:
        """``[2]`` sums of what rows that are some return, and of the states that they write, beside the exact ones;
        other slots stay as they are.
        """
        real, written = (target != 0).cpu(), target[target > 0].cpu()
        others = [slot for slot in range(1, len(exact.states)) if slot not in written.tolist()]
        assert torch.equal(self.states[others], exact.states[others]), "a slot changed that no row writes"
        pairs = (self.out[real], exact.out[real]), (self.states[written], exact.states[written])
        return torch.stack([(mine - right).abs().sum() for mine, right in pairs])


def moves(rows: int, generator: torch.Generator, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Slots before and after a step: some rows go on in their slot, some begin in one that others read too, the last
    but one writes nothing, and the last is none.
    """
    slots = 1 + torch.randperm(SLOTS - 1, generator=generator)
    source = slots[:rows].clone()
    target = source.clone()
    source[: rows // 2] = slots[-1]
    target[rows - 2], target[rows - 1], source[rows - 1] = -1, 0, 0
    return source.to(device), target.to(device)


def conv_arguments(
    generator: torch.Generator,
    dtype: torch.dtype,
    rows: int = 6,
    channels: int = 300,
    width: int = 4,
    bias: bool = True,
    device: str | torch.device = "cpu",
) -> list[Tensor | None]:
    """Of ``conv_step``, but for ``silu``; x is a part of rows that are longer, as a projection's are."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = random(rows, channels + 7)[:, 3 : channels + 3]
    weight, states = random(channels, width), random(SLOTS, channels, width)
    return [x, weight, random(channels) if bias else None, states, *moves(rows, generator, device)]


def conv_oracle(given: Sequence[Tensor | None], silu: bool) -> Step:
    """In float64, from the arguments before the call."""
    x, weight, bias, states, source, target = (None if of is None else of.cpu() for of in given)
    assert x is not None and weight is not None and states is not None and source is not None and target is not None
    window = torch.cat([states[source].double()[..., 1:], x.double()[..., None]], -1)
    out = (window * weight.double()).sum(-1) + (0 if bias is None else bias.double())
    after = states.double()
    for row, slot in enumerate(target.tolist()):
        if slot > 0:
            after[slot] = window[row]
    return Step(F.silu(out) if silu else out, after)


def mamba2_arguments(
    generator: torch.Generator,
    dtype: torch.dtype,
    rows: int = 6,
    heads: int = 4,
    dim: int = 10,
    size: int = 16,
    groups: int = 2,
    skip: bool = True,
    bias: bool = True,
    gate: bool = False,
    weights: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> list[Tensor | None]:
    """Of ``mamba2_step``; x, dt, B, C and the gate are parts of longer rows, and steps reach from 1e-4 to above 20."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    inner, parts = heads * dim, groups * size
    row = random(rows, 2 * inner + 2 * parts + heads)
    x, gated, inward, outward, dt = row.split([inner, inner, parts, parts, heads], 1)
    weights = weights or dtype
    of_heads = [random(heads).to(weights) for _ in range(2)]
    rate = -torch.rand(heads, generator=generator).mul(16).add(0.1).to(device)
    states = torch.randn(SLOTS, heads, dim, size, generator=generator).to(device)
    if rows > 2:
        dt[0], dt[1] = 25.0, -9.0
    return [
        x.view(rows, heads, dim),
        dt,
        rate,
        inward.view(rows, groups, size),
        outward.view(rows, groups, size),
        of_heads[0] if skip else None,
        of_heads[1] if bias else None,
        gated.view(rows, heads, dim) if gate else None,
        states,
        *moves(rows, generator, device),
    ]


def mamba2_oracle(given: Sequence[Tensor | None]) -> Step:
    """In float64, from the arguments before the call, a head of a row at a time."""
    x, dt, rate, inward, outward, skip, bias, gate, states, source, target = (
        None if of is None else of.cpu() if of.dtype == torch.int64 else of.cpu().double() for of in given
    )
    assert x is not None and dt is not None and rate is not None and inward is not None and outward is not None
    assert states is not None and source is not None and target is not None
    heads, share = x.shape[1], x.shape[1] // inward.shape[1]
    out, after = torch.empty_like(x), states.clone()
    for row in range(len(x)):
        for head in range(heads):
            step = torch.log1p(torch.exp(dt[row, head] + (0 if bias is None else bias[head])))
            held = states[source[row], head] * torch.exp(step * rate[head])
            held = held + torch.outer(step * x[row, head], inward[row, head // share])
            y = held @ outward[row, head // share]
            y = y if skip is None else y + skip[head] * x[row, head]
            out[row, head] = y if gate is None else y * F.silu(gate[row, head])
            if target[row] > 0:
                after[target[row], head] = held
    return Step(out, after)


def delta_arguments(
    generator: torch.Generator,
    dtype: torch.dtype,
    rows: int = 5,
    tokens: int = 3,
    heads: int = 4,
    key_heads: int = 2,
    size: int = 10,
    dim: int = 6,
    normalize: bool = True,
    device: str | torch.device = "cpu",
) -> list[Any]:
    """Of ``delta_rule``; query, key and value are parts of longer columns, as those of a convolution are."""
    parts = [key_heads * size, key_heads * size, heads * dim]
    columns = torch.randn(rows, sum(parts), tokens + 2, generator=generator).to(device, dtype)
    query, key, value = columns[..., 2:].mT.split(parts, 2)
    decay = -torch.rand(rows, tokens, heads, generator=generator).mul(8).sub(5).exp().to(device)
    beta = torch.rand(rows, tokens, heads, generator=generator).to(device, dtype)
    states = torch.randn(SLOTS, heads, size, dim, generator=generator).to(device)
    if not normalize:  # else a state grows from token to token
        key = key / size
    query, key = (of.unflatten(2, (key_heads, size)) for of in (query, key))
    return [
        query,
        key,
        value.unflatten(2, (heads, dim)),
        decay,
        beta,
        normalize,
        states,
        *moves(rows, generator, device),
    ]


def delta_oracle(given: Sequence[Any]) -> Step:
    """In float64, from the arguments before the call, a head of a row at a time."""
    query, key, value, decay, beta, _, states = (
        of.cpu().double() if isinstance(of, Tensor) else of for of in given[:7]
    )
    source, target = (of.cpu() for of in given[7:])
    (rows, tokens, heads, _), share = value.shape, value.shape[2] // key.shape[2]
    if given[5]:
        query, key = (of / (of.square().sum(-1, keepdim=True) + 1e-6).sqrt() for of in (query, key))
    out, after = torch.empty_like(value), states.clone()
    for row in range(rows):
        for head in range(heads):
            held = states[source[row], head]
            for at in range(tokens):
                held = held * torch.exp(decay[row, at, head])
                k, q = key[row, at, head // share], query[row, at, head // share]
                held = held + torch.outer(k, beta[row, at, head] * (value[row, at, head] - k @ held))
                out[row, at, head] = q @ held / key.shape[3] ** 0.5
            if target[row] > 0:
                after[target[row], head] = held
    return Step(out, after)


def delta_by_torch(given: Sequence[Any]) -> Step:
    """The same as transformers' torch code computes it: of several tokens in chunks."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    query, key, value, decay, beta, normalize, states, source, target = given
    tokens, share = value.shape[1], value.shape[2] // key.shape[2]
    query, key = (of.repeat_interleave(share, 2) for of in (query, key))  # 5.17 does so outside of the function
    rule = theirs.torch_recurrent_gated_delta_rule if tokens == 1 else theirs.torch_chunk_gated_delta_rule
    gates = {"g": decay, "beta": beta, "initial_state": states[source], "use_qk_l2norm_in_kernel": normalize}
    out, held = rule(query, key, value, **gates, output_final_state=True)
    return Step(out.double().cpu(), states.double().index_copy(0, target.clamp(min=0), held.double()).cpu())


def norm_oracle(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float) -> Tensor:
    """Of ``rms_norm``, in float64."""
    wide = x.double()
    y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
    return y if gate is None else y * F.silu(gate.double())


def conv_by_torch(given: Sequence[Tensor | None], silu: bool) -> Step:
    """As transformers' torch code computes it, from the arguments before the call."""
    from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_update

    x, weight, bias, states, source, target = given
    assert x is not None and states is not None and source is not None and target is not None
    held = states[source]
    out = causal_conv1d_update(x[..., None], held, weight, bias, activation="silu" if silu else None)[..., 0]
    return Step(out.double().cpu(), states.double().index_copy(0, target.clamp(min=0), held.double()).cpu())


def mamba2_by_torch(given: Sequence[Tensor | None]) -> Step:
    """The same of ``mamba2_step``."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    x, dt, rate, inward, outward, skip, bias, gate, states, source, target = given
    assert dt is not None and rate is not None and states is not None and source is not None and target is not None
    held, (dim, size) = states[source], states.shape[2:]
    skip, bias = (None if of is None else of[:, None].expand(-1, dim) for of in (skip, bias))
    wide = dt[..., None].expand(-1, -1, dim), rate[:, None, None].expand(-1, dim, size), inward, outward
    out = mamba2_selective_state_update(held, x, *wide, skip, dt_bias=bias, dt_softplus=True, z=gate)
    return Step(out.double().cpu(), states.double().index_copy(0, target.clamp(min=0), held.double()).cpu())
