"""Linear recurrences from an initial state, in plain torch.

A recurrence is ``state[t] = decay[t] * state[t - 1] + added[t]``, elementwise. If a state is large, tokens run one
after the other. If it is so small that kernel launches would take most of the time, tokens form up to ``sqrt(tokens)``
blocks. All blocks run side by side, each from a zero state; then the state at the start of each block is computed from
the blocks before; then that state, multiplied by the decays in between, is added to the state of each token of the
block. So 1,024 tokens take 64 steps, and each element is read a few times. Nothing is divided, so decays may underflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# By device: the least number of elements that a step should have, and the largest number of elements of states that one
# pass computes: on a CPU they should stay in its cache, on a GPU they take 128 MiB in float32.
_STEP = {"cpu": 2**12, "cuda": 2**18}
_PASS = {"cpu": 2**18, "cuda": 2**25}


def scan(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """The state after each token.

    Args:
        decay: The factor of each token on the state before it, ``[tokens, ...]``.
        added: The term that each token adds, ``[tokens, ...]``.
        state: The state before the first token, ``[...]``, in the dtype of ``decay`` and ``added``.

    Returns:
        ``[tokens, ...]``.
    """
    tokens = len(decay)
    blocks = min(math.ceil(math.sqrt(tokens)), math.ceil(_STEP.get(state.device.type, _STEP["cuda"]) / state.numel()))
    width = math.ceil(tokens / blocks)
    blocks = math.ceil(tokens / width)
    after = blocks * width - tokens  # dummy tokens after the last, on which no result depends
    if after:
        decay, added = (torch.cat([each, each.new_zeros(after, *each.shape[1:])]) for each in (decay, added))
    decay, added = (each.reshape(blocks, width, *each.shape[1:]) for each in (decay, added))
    within = [added[:, 0] if blocks > 1 else torch.addcmul(added[:, 0], decay[:, 0], state)]
    for token in range(1, width):
        within.append(torch.addcmul(added[:, token], decay[:, token], within[-1]))
    states = torch.stack(within, 1)
    if blocks == 1:
        return states[0]
    left = decay.cumprod(1)
    starts = [state]
    for block in range(blocks - 1):
        starts.append(torch.addcmul(states[block, -1], left[block, -1], starts[-1]))
    return torch.addcmul(states, left, torch.stack(starts)[:, None]).flatten(0, 1)[:tokens]


def selective_scan(
    inputs: Tensor, time_step: Tensor, rate: Tensor, inward: Tensor, outward: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The scan of Mamba 1 from an initial state, for all tokens and groups of channels at once.

    Computes in float32, or in float64 if the arguments are float64.

    Args:
        inputs: x, ``[batch, groups, channels, tokens]``.
        time_step: Δ, positive, of the same shape.
        rate: A, negative, ``[groups, channels, state_size]``.
        inward: B, ``[batch, groups, tokens, state_size]``.
        outward: C, of the same shape as ``inward``.
        state: ``[batch, groups, channels, state_size]``.

    Returns:
        ``(outputs, state)``: ``C h`` for each token, shaped as ``inputs``, and the state after the last one.
    """
    dtype = torch.promote_types(torch.promote_types(inputs.dtype, time_step.dtype), torch.float32)
    inputs, time_step = (
        each.to(dtype).movedim(-1, 0) for each in (inputs, time_step)
    )  # [tokens, batch, groups, channels]
    inward, outward = (
        each.to(dtype).movedim(-2, 0) for each in (inward, outward)
    )  # [tokens, batch, groups, state_size]
    rate, state = rate.to(dtype), state.to(dtype)
    outputs, span = [], max(1, _PASS.get(state.device.type, _PASS["cuda"]) // state.numel())
    for start in range(0, len(inputs), span):
        now = slice(start, start + span)
        decay = torch.exp(time_step[now, ..., None] * rate)
        added = (time_step[now] * inputs[now])[..., None] * inward[now, ..., None, :]
        states = scan(decay, added, state)
        outputs.append((states @ outward[now, ..., None]).squeeze(-1))
        state = states[-1]
    return torch.cat(outputs).movedim(0, -1), state


def causal_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None, tokens: int) -> Tensor:
    """A depthwise causal convolution: its outputs for the last ``tokens`` tokens.

    Args:
        inputs: ``[batch, channels, tokens or more]``: the tokens, preceded by earlier ones if there are any.
        weight: ``[channels, 1, width]``.
        bias: ``[channels]``, or None.
        tokens: The number of outputs.

    Returns:
        ``[batch, channels, tokens]``.
    """
    seen = tokens + weight.shape[-1] - 1
    inputs = F.pad(inputs, (max(0, seen - inputs.shape[-1]), 0))[..., -seen:]
    return F.conv1d(inputs, weight, bias, groups=len(weight))
