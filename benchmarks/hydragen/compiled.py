"""The same decode step with a Llama's modules through torch.compile, cut only where attention is.

Weights come as arguments, so that all layers share three compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from benchmarks.hydragen.methods import Core


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _before(
    h: Tensor, head_dim: int, eps: float, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x = _norm(h, norm, eps)
    q, k, v = (linear(x, weight).unflatten(-1, (-1, head_dim)) for weight in (wq, wk, wv))
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _after(
    h: Tensor, out: Tensor, eps: float, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    h = h + linear(out.flatten(1), wo)
    x = _norm(h, norm, eps)
    return h + linear(silu(linear(x, gate)) * linear(x, up), down)


def _between(
    h: Tensor,
    out: Tensor,
    head_dim: int,
    eps: float,
    after: list[Tensor],
    before: list[Tensor],
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = _after(h, out, eps, *after)
    return h, *_before(h, head_dim, eps, *before, cos, sin)


def _last(h: Tensor, out: Tensor, eps: float, after: list[Tensor], norm: Tensor, head: Tensor) -> Tensor:
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
        q, k, v = self._before(h, self._head_dim, self._eps, *_first_weights(layers[0]), cos, sin)
        for index, layer in enumerate(layers):
            core.append(index, k, v)
            out = core.attend(index, q, self._scale)
            self._any_batch(h, out)
            if index + 1 < len(layers):
                following = _first_weights(layers[index + 1])
                h, q, k, v = self._between(
                    h, out, self._head_dim, self._eps, _other_weights(layer), following, cos, sin
                )
        chosen: Tensor = self._last(
            h, out, self._eps, _other_weights(layer), inner.norm.weight, self._model.lm_head.weight
        )
        return chosen

    def _any_batch(self, *tensors: Tensor) -> None:
        """Compile for any batch at once: the first dimension."""
        if self._compile:
            for tensor in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _first_weights(layer: Any) -> list[Tensor]:
    attention = layer.self_attn
    return [
        layer.input_layernorm.weight,
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
    ]


def _other_weights(layer: Any) -> list[Tensor]:
    mlp = layer.mlp
    return [
        layer.self_attn.o_proj.weight,
        layer.post_attention_layernorm.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    ]
