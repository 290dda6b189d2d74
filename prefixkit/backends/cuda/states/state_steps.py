"""The ops of ``ops.state_ops`` by our kernels; plain torch computes sizes that no kernel supports."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.states.state_units import (
    CONV_STEP,
    CONV_WIDTHS,
    KEY_SIZES,
    NORM_LANES,
    RMS_NORM,
    STATE_SIZES,
    conv_name,
    delta_name,
    delta_unit,
    mamba2_name,
    mamba2_unit,
    norm_name,
)
from prefixkit.backends.torch import plain_states
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch

log = logging.getLogger("prefixkit")

_THREADS = 256
_MOST_DIM = 256  # MOST_DIM of mamba2_step.cu
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum Kind of csrc/states/numbers.cuh
_VECTOR = 16
_SHORT = 512  # a warp takes a row of up to this many elements
_RULE_THREADS, _RULE_COLUMNS, _PAIR = 128, 32, 8  # of delta_rule.cu: threads and columns of a block, bytes of a pair


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, source: Tensor, target: Tensor, silu: bool
) -> Tensor:
    """``conv_step``; the op has checked its arguments."""
    channels, width = weight.shape
    vector = x.element_size() * (1 if width & (width - 1) else width)  # alignment of Window in conv_step.cu
    if width not in CONV_WIDTHS or (states.data_ptr() | weight.data_ptr()) % vector:
        _say("conv_step", x.device, f"no kernel is for a width of {width} of what lies so")
        return plain_states.conv_step(x, weight, bias, states, source, target, silu)
    x, out = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(x.shape)
    values = (*map(_address, (x, weight, bias, states, source, target, out)), x.stride(0), len(states), channels, silu)
    function = jit.load(CONV_STEP, x.device.index)[conv_name(layouts.dtype_name(x.dtype), width)]
    grid, what = (-(-channels // _THREADS) * len(x), 1, 1), f"conv_step on {x.device}: {list(x.shape)} {x.dtype}"
    launch(layouts.CONV_STEP.check(function), layouts.CONV_STEP, values, grid, _THREADS, 0, what.__str__)
    return out


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
    given = x, dt, rate, inward, outward, skip, bias, gate, states, source, target
    (rows, heads, dim), (groups, size) = x.shape, inward.shape[1:]
    if size not in STATE_SIZES or dim > _MOST_DIM or states.data_ptr() % _VECTOR:
        _say("mamba2_step", x.device, f"no kernel is for states of {dim} x {size} that lie so")
        return plain_states.mamba2_step(*given)
    x, inward, outward, out = _rows(x), _rows(inward), _rows(outward), x.new_empty(x.shape)
    dt, rate = dt if dt.stride(1) == 1 else dt.contiguous(), rate.contiguous()
    gate, skip, bias = (None if of is None else _rows(of) for of in (gate, skip, bias))
    strides = [0 if of is None else of.stride(0) for of in (x, dt, inward, outward, gate)]
    kinds = [0 if of is None else _KINDS[of.dtype] for of in (dt, skip, bias)]
    tensors = x, dt, rate, inward, outward, skip, bias, gate, states, source, target, out
    values = (*map(_address, tensors), *strides, len(states), heads, heads // groups, dim, *kinds)
    function = jit.load(mamba2_unit(size), x.device.index)[mamba2_name(layouts.dtype_name(x.dtype), size)]
    what = f"mamba2_step on {x.device}: {list(x.shape)} {x.dtype}, {groups} groups, states of {size}"
    grid = heads * rows, 1, 1
    launch(layouts.MAMBA2_STEP.check(function), layouts.MAMBA2_STEP, values, grid, _THREADS, 0, what.__str__)
    return out


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
    padded = next((one for one in KEY_SIZES if size <= one), 0)
    if not padded or dim % 2 or states.data_ptr() % _PAIR:
        _say("delta_rule", value.device, f"no kernel is for states of {size} x {dim} that lie so")
        return plain_states.delta_rule(query, key, value, decay, beta, normalize, states, source, target)
    decay, beta, out = decay.contiguous(), beta.contiguous(), value.new_empty(value.shape)
    tensors = query, key, value, decay, beta, states, source, target, out
    strides = *query.stride(), *key.stride(), *value.stride()
    sizes = len(states), tokens, heads, heads // key.shape[2], size, dim, normalize, _KINDS[beta.dtype]
    function = jit.load(delta_unit(padded), value.device.index)[delta_name(layouts.dtype_name(value.dtype), padded)]
    what = f"delta_rule on {value.device}: {list(value.shape)} {value.dtype}, keys of {size}"
    grid = -(-dim // _RULE_COLUMNS) * heads * rows, 1, 1
    values = (*map(_address, tensors), *strides, *sizes)
    launch(layouts.DELTA_RULE.check(function), layouts.DELTA_RULE, values, grid, _RULE_THREADS, 0, what.__str__)
    return out


def rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float) -> Tensor:
    """``rms_norm``, likewise."""
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, gate = _flat(x), None if gate is None else _flat(gate)
    lanes = NORM_LANES[dim > _SHORT]
    if not len(x):
        return out
    values = (
        *map(_address, (x, weight, gate, out)),
        *(len(x), x.stride(0), 0 if gate is None else gate.stride(0)),
        *(dim, _KINDS[weight.dtype], eps, offset),
    )
    function = jit.load(RMS_NORM, x.device.index)[norm_name(layouts.dtype_name(x.dtype), lanes)]
    grid, what = (-(-len(x) // (_THREADS // lanes)), 1, 1), f"rms_norm on {x.device}: {list(x.shape)} {x.dtype}"
    launch(layouts.RMS_NORM.check(function), layouts.RMS_NORM, values, grid, _THREADS, 0, what.__str__)
    return out


def _flat(x: Tensor) -> Tensor:
    """``[rows, dim]``, each row contiguous."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """The tensor, with each row (of the first axis) contiguous."""
    whole = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != whole:
            return x.contiguous()
        whole *= size
    return x if x.ndim > 1 else x.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _say(op: str, device: Any, why: str) -> None:
    log.info("%s on %s runs in plain torch: %s", op, device, why)
