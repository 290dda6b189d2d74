"""ALiBi as Falcon computes it: in bfloat16, whatever the dtype of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.attention.variants import Body, Variant


def rounded_alibi(slopes: Sequence[float], factor: float) -> Variant:
    """Each score gets ``factor * bfloat16(slope * bfloat16(kv_position))``.

    A key's bias depends on its position, not on its distance alone: far keys that round alike get the same.

    Args:
        slopes: One for each query head.
        factor: What scores get the bias times.

    Raises:
        ValueError: there are no slopes; or they or the factor are not finite, or the factor is 0.
    """
    if not slopes or not all(map(math.isfinite, (*slopes, factor))) or not factor:
        raise ValueError(f"rounded_alibi: slopes and a factor other than 0 must be finite, got {slopes} and {factor}")
    per_head = torch.tensor(slopes, dtype=torch.float32, device="cpu")
    times = float(factor)

    def score_mod(score: Tensor, q_position: Tensor, kv_position: Tensor, head: Tensor) -> Tensor:
        position = kv_position.to(torch.bfloat16).float()
        return score + times * (per_head.to(score.device)[head] * position).to(torch.bfloat16).float()

    # Numbers per head are a body's only parameters, so the factor is taken out of the score and put back.
    bodies = (
        Body("score / p[0]", None, torch.tensor([times], dtype=torch.float32, device="cpu")),
        Body(f"score + {_rounded('p[head] * ' + _rounded('float(kv_position)'))}", None, per_head),
        Body("score * p[0]", None, torch.tensor([times], dtype=torch.float32, device="cpu")),
    )
    return Variant(f"rounded_alibi({len(per_head)} heads, x {times:g})", score_mod=score_mod, bodies=bodies)


def _rounded(value: str) -> str:
    """C++ that rounds a float to bfloat16, ties to even."""
    bits = f"__float_as_int({value})"
    return f"__int_as_float(({bits} + 0x7fff + (({bits} >> 16) & 1)) & int(0xffff0000))"
