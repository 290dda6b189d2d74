"""Mamba 1 for several tokens that continue a state, for which transformers would start its scan from zero.

The states of a layer are transformers' own: ``conv_states[0] [batch, channels, width]`` in the model's dtype, and
``recurrent_states[0]`` in float32, ``[batch, channels, state_size]``, for Zamba ``[batch, heads, channels of a head,
state_size]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prefixkit.models.requirements import cache_keyword
from prefixkit.models.states.held_states import hold, layer_of, state_before
from prefixkit.models.states.own_scan import causal_conv, selective_scan

# A function of a mixer and its convolved inputs [batch, heads, channels, tokens] that returns time steps of the same
# shape, and B and C, [batch, heads, tokens, state_size].
Parameters = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]


def plain(mixer: Any, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parameters of Mamba's scan."""
    time_step, inward, outward = _split(mixer, mixer.x_proj(inputs.mT))
    return _positive(mixer.dt_proj.weight @ time_step.mT, mixer.dt_proj.bias), inward, outward


def normed(mixer: Any, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a norm on each parameter, as in FalconMamba and Jamba."""
    time_step, inward, outward = _split(mixer, mixer.x_proj(inputs.mT))
    time_step, bias = mixer.dt_layernorm(time_step), mixer.dt_proj.bias
    if hasattr(mixer.config, "_is_quantized"):  # no plain weight matrix: transformers calls the module too
        time_step = (mixer.dt_proj(time_step) - bias).mT
    else:
        time_step = mixer.dt_proj.weight @ time_step.mT
    return _positive(time_step, bias), mixer.b_layernorm(inward), mixer.c_layernorm(outward)


def of_each_head(mixer: Any, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with separate weights for each head, as in Zamba."""
    time_step, inward, outward = _split(mixer, (mixer.x_proj_weight @ inputs).mT)
    return _positive(mixer.dt_proj_weight @ time_step.mT, mixer.dt_proj_bias), inward, outward


def mamba(original: Callable[..., Tensor], parameters: Parameters, heads: bool = False) -> Callable[..., Tensor]:
    """The body that runs in place of a Mamba mixer's ``forward``.

    Args:
        original: That ``forward``, which is correct for one token, and runs kernels where they are installed.
        parameters: Computes the parameters of the scan.
        heads: Whether the mixer has heads.
    """
    keyword = cache_keyword(inspect.signature(original).parameters)

    def body(mixer: Any, hidden_states: Tensor, cache: Any, attention_mask: None = None, **kwargs: Any) -> Tensor:
        layer = layer_of(mixer, cache)
        tokens, before = hidden_states.shape[1], state_before(layer)
        if tokens == 1 and before is not None:
            return original(mixer, hidden_states, **{keyword: cache}, **kwargs)
        projected = mixer.in_proj(hidden_states).mT
        # In mixers with heads, inputs and gates alternate.
        inputs, gate = projected.unflatten(1, (-1, 2)).unbind(2) if heads else projected.chunk(2, 1)
        context = layer.update_conv_state(inputs, conv_kernel_size=mixer.conv_kernel_size)
        inputs = mixer.act(causal_conv(context, mixer.conv1d.weight, mixer.conv1d.bias, tokens))
        by_head = (mixer.n_mamba_heads if heads else 1, -1)
        inputs, gate = (each.unflatten(1, by_head) for each in (inputs, gate))
        rate, skip = -torch.exp(mixer.A_log.float()), mixer.D.float()
        if not heads:
            rate, skip, before = rate[None], skip[None], None if before is None else before[:, None]
        if before is None:
            before = inputs.new_zeros(*inputs.shape[:-1], rate.shape[-1])
        time_step, inward, outward = parameters(mixer, inputs)
        outputs, after = selective_scan(inputs, time_step, rate, inward, outward, before)
        hold(layer, after if heads else after[:, 0])
        outputs = (outputs + inputs * skip[..., None]) * F.silu(gate)
        mixed: Tensor = mixer.out_proj(outputs.flatten(1, 2).mT.to(hidden_states.dtype))
        return mixed

    return body


def _positive(time_step: Tensor, bias: Tensor) -> Tensor:
    return F.softplus(time_step + bias.float()[..., None])


def _split(mixer: Any, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = mixer.ssm_state_size
    time_step, inward, outward = torch.split(parameters, [mixer.time_step_rank, size, size], -1)
    return time_step, inward, outward
