"""MiniMax's lightning attention, which reads its state from a cache class of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prefixkit.models.states.held_states import hold, layer_of, state_before


def lightning(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: object = None,
    attention_mask: None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The body that runs in place of the ``forward`` of ``MiniMaxLightningAttention``.

    Its state, ``recurrent_states[0]``, is ``[batch, heads, head_dim, head_dim]`` in the model's dtype. Tokens run in
    blocks from any state, whereas transformers runs tokens that continue a state one by one.

    Returns:
        ``[batch, tokens, hidden_size]``, and None for the state, which no caller reads.
    """
    layer = layer_of(attention, cache)
    heads = (attention.num_attention_heads, 3 * attention.head_dim)
    projected = attention.act_fn(attention.qkv_proj(hidden_states)).unflatten(-1, heads).transpose(1, 2)
    queries, keys, values = projected.chunk(3, -1)  # [batch, heads, tokens, head_dim]
    state = state_before(layer)
    if state is None:
        state = values.new_zeros(*values.shape[:2], keys.shape[-1], values.shape[-1])
    outputs = []
    for start in range(0, hidden_states.shape[1], attention.block_size):
        now = slice(start, start + attention.block_size)
        out, state = _block(attention, queries[:, :, now], keys[:, :, now], values[:, :, now], state)
        outputs.append(out)
    hold(layer, state)
    normed = attention.norm(torch.cat(outputs, 2).transpose(1, 2).flatten(2))
    return attention.out_proj(F.sigmoid(attention.output_gate(hidden_states)) * normed), None


def _block(attention: Any, queries: Tensor, keys: Tensor, values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of at most ``block_size`` tokens, and the state after them."""
    tokens = queries.shape[2]
    weights = (queries @ keys.mT) * attention.diagonal_decay[:, :, :tokens, :tokens]
    outputs = (queries * attention.query_decay[:, :tokens]) @ state + weights @ values
    added = (keys * attention.key_decay[:, -tokens:]).mT @ values
    return outputs, state * torch.exp(-attention.slope_rate * tokens) + added
