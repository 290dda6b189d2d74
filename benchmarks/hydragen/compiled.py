"""The same decode step with a Llama's modules through torch.compile, cut only where attention is.

Weights come as arguments, so that all layers share three compiled functions.  With attention, q, k and v are one product
where prefixkit's compiled layers pack them, and prefixkit's core rotates and appends in one launch, as these layers do;
without, modules are as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from benchmarks.hydragen.methods import Core
from prefixkit.models.compile.packed_weights import pack, packed_view
from prefixkit.models.compile.packing import fills


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


# Weights of one input: as they are multiplied, and how many rows of each belong to which of them.
_Weights = list[tuple[Tensor, list[int]]]


def _products(x: Tensor, weights: _Weights) -> list[Tensor]:
    return [part for weight, widths in weights for part in linear(x, weight).split(widths, -1)]


# Cosines and sines; None where a core rotates.
_Angles = tuple[Tensor, Tensor] | None


def _before(
    h: Tensor, head_dim: int, eps: float, norm: Tensor, qkv: _Weights, angles: _Angles
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in _products(_norm(h, norm, eps), qkv))
    return (q, k, v) if angles is None else (_rotate(q, *angles), _rotate(k, *angles), v)


def _after(h: Tensor, out: Tensor, eps: float, wo: Tensor, norm: Tensor, gate_up: _Weights, down: Tensor) -> Tensor:
    h = h + linear(out.flatten(1), wo)
    gate, up = _products(_norm(h, norm, eps), gate_up)
    return h + linear(silu(gate) * up, down)


def _between(
    h: Tensor,
    out: Tensor,
    head_dim: int,
    eps: float,
    after: tuple[Tensor, Tensor, _Weights, Tensor],
    before: tuple[Tensor, _Weights],
    angles: _Angles,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = _after(h, out, eps, *after)
    return h, *_before(h, head_dim, eps, *before, angles)


def _last(
    h: Tensor, out: Tensor, eps: float, after: tuple[Tensor, Tensor, _Weights, Tensor], norm: Tensor, head: Tensor
) -> Tensor:
    return linear(_norm(_after(h, out, eps, *after), norm, eps), head).argmax(-1)


class CompiledStep:
    """``tokens, positions [batch]`` to the next tokens, attention by a core.

    Args:
        model: A Llama for causal language modelling.
        compile: Or the same functions as they are.
    """

    def __init__(self, model: Any, compile: bool) -> None:
        self._model, config = model, model.config
        self._head_dim, self._eps, self._scale = config.head_dim, config.rms_norm_eps, config.head_dim**-0.5
        self._compile = compile
        if compile:
            torch._dynamo.reset()
        made: Callable[[Any], Any] = torch.compile(fullgraph=True) if compile else (lambda f: f)
        self._before, self._between, self._last = (made(function) for function in (_before, _between, _last))

    def __call__(self, tokens: Tensor, positions: Tensor, core: Core) -> Tensor:
        inner = self._model.model
        h = inner.embed_tokens(tokens)
        cos, sin = (part[0] for part in inner.rotary_emb(h[None], positions[None]))
        layers = list(inner.layers)
        self._any_batch(h, cos, sin)
        rows = None if type(core) is Core else len(h)
        angles = None if core.rotates else (cos, sin)
        q, k, v = self._before(h, self._head_dim, self._eps, *_first_weights(layers[0], rows), angles)
        for index, layer in enumerate(layers):
            if core.rotates:
                q = core.rotary_append(index, q, k, v, cos, sin)
            else:
                core.append(index, k, v)
            out = core.attend(index, q, self._scale)
            self._any_batch(h, out)
            if index + 1 < len(layers):
                following = _first_weights(layers[index + 1], rows)
                h, q, k, v = self._between(h, out, self._head_dim, self._eps, _other_weights(layer), following, angles)
        chosen: Tensor = self._last(
            h, out, self._eps, _other_weights(layer), inner.norm.weight, self._model.lm_head.weight
        )
        return chosen

    def _any_batch(self, *tensors: Tensor) -> None:
        """Compile for any batch at once: the first dimension."""
        if self._compile:
            for tensor in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _first_weights(layer: Any, rows: int | None) -> tuple[Tensor, _Weights]:
    attention = layer.self_attn
    projections = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return layer.input_layernorm.weight, _laid(projections, rows)


def _other_weights(layer: Any) -> tuple[Tensor, Tensor, _Weights, Tensor]:
    mlp = layer.mlp
    gate_up = _laid([mlp.gate_proj.weight, mlp.up_proj.weight], None)
    return layer.self_attn.o_proj.weight, layer.post_attention_layernorm.weight, gate_up, mlp.down_proj.weight


def _laid(weights: list[Tensor], rows: int | None) -> _Weights:
    """Those that are too small for a GPU as one; none if ``rows`` is None."""
    small = [weight for weight in weights if rows is not None and not fills(rows, len(weight), weight.device)]
    if len(small) < 2:
        return [(weight, [len(weight)]) for weight in weights]
    if packed_view(weights) is None:  # all of them, so that it is done once whatever their number of rows
        pack(weights)
    whole = packed_view(small)
    assert whole is not None and [weight.data_ptr() for weight in weights[-len(small) :]] == [
        weight.data_ptr() for weight in small
    ], "the small ones follow the others"
    large = [(weight, [len(weight)]) for weight in weights[: -len(small)]]
    return [*large, (whole, [len(weight) for weight in small])]
