"""RecurrentGemma's recurrent block, which stores states as attributes, and continues its convolution by one token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefixkit.models.states.held_states import hold, layer_of, state_before
from prefixkit.models.states.own_scan import causal_conv, scan


def griffin(
    block: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The body that runs in place of the ``forward`` of ``RecurrentGemmaRecurrentBlock``.

    Its states are ``conv_states[0] [batch, width of the recurrence, conv1d_width - 1]`` in the model's dtype and
    ``recurrent_states[0] [batch, width of the recurrence]`` in float32.

    Args:
        block: The module.
        input_states: ``[batch, tokens, hidden_size]``.
        position_ids: ``[batch or 1, tokens]``: a token at position 0 begins a text.
        attention_mask: For attention layers; ignored here, where no token is padding.
        use_cache: Ignored.
        cache: The cache that holds the states.
        kwargs: Arguments for other layers; ignored.

    Returns:
        ``(outputs, None)`` as the original does; outputs are ``[batch, tokens, hidden_size]``.
    """
    layer = layer_of(block, cache)
    before = state_before(layer)
    inputs, convolution = block.linear_x(input_states).mT, block.conv_1d
    context = layer.update_conv_state(inputs, conv_kernel_size=block.conv1d_width - 1)
    inputs = causal_conv(context, convolution.weight, convolution.bias, inputs.shape[-1])
    if before is None:
        before = inputs.new_zeros(inputs.shape[:2], dtype=torch.float32)
    unit = _from_state(block.rg_lru, before)
    recurrent = type(unit).forward(unit, inputs.mT, position_ids)  # not by a hook, which would run the module itself
    hold(layer, unit.recurrent_states)
    return block.linear_out(recurrent * block.act_fn(block.linear_y(input_states))), None


def _from_state(unit: Any, state: Tensor) -> Any:
    """A recurrent unit with the same weights that starts from ``state``, and runs blocks of tokens side by side."""
    copy = object.__new__(type(unit))
    copy.__dict__.update(unit.__dict__)
    copy.__dict__.update(recurrent_states=state, _rnn_scan=_scan)
    return copy


def _scan(
    hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Tensor
) -> tuple[Tensor, Tensor]:
    decay = (recurrent_gate * ~reset).float().transpose(0, 1)
    states = scan(decay, hidden_states.float().transpose(0, 1), recurrent_states)
    return states.transpose(0, 1).to(hidden_states.dtype), states[-1]
