"""The variants that models' configs specify: windows, chunks, caps, biases, sinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from prefixkit.attention.variants.variant import Variant, variant


@lru_cache(maxsize=1024, typed=True)
def sliding_window(size: int, causal: bool = True) -> Variant:
    """Each query sees the last ``size`` tokens of its sequence, itself included (Beltagy et al. 2020, 3.1).

    With ``causal=False`` a query sees all later tokens too.  ValueError unless ``size`` is 1 or more.
    """
    check_count("sliding_window", "size", size)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = q_idx - kv_idx < size
        return near & (kv_idx <= q_idx) if causal else near

    return variant(mask_mod=mask_mod, name=f"sliding_window({size}{'' if causal else ', causal=False'})")


@lru_cache(maxsize=1024, typed=True)
def chunked(size: int, causal: bool = True) -> Variant:
    """Each query sees its own chunk of ``size`` tokens only, up to itself if ``causal``; chunks begin at multiples of
    ``size``.

    ValueError unless ``size`` is 1 or more.
    """
    check_count("chunked", "size", size)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = q_idx // size == kv_idx // size
        return same & (kv_idx <= q_idx) if causal else same

    return variant(mask_mod=mask_mod, name=f"chunked({size}{'' if causal else ', causal=False'})")


def check_count(function: str, parameter: str, value: object, least: int = 1) -> None:
    """Raise ValueError, naming the function and its parameter, unless a value is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{function}: {parameter} must be an integer of at least {least}, got {value!r}")


@lru_cache(maxsize=1024, typed=True)
def soft_cap(cap: float) -> Variant:
    """Smoothly bounded scores: ``cap * tanh(score / cap)`` (Gemma 2; Bello et al. 2017).

    ValueError unless ``cap`` is finite, above 0.
    """
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < math.inf:
        raise ValueError(f"soft_cap: cap must be a finite number above 0, got {cap!r}")
    bound = float(cap)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return variant(score_mod, name=f"soft_cap({bound:g})")


def alibi(slopes: Tensor | Sequence[float]) -> Variant:
    """Attention with linear biases: each head subtracts ``slope * distance`` (Press et al. 2022).

    Args:
        slopes: ``[heads]`` the slope of each query head, used in float32; the paper's slopes are powers of two.

    Raises:
        ValueError: ``slopes`` are not a row of finite numbers.
    """
    numbers = torch.as_tensor(slopes).detach().to(torch.float32, copy=True).cpu()
    if numbers.ndim != 1 or not len(numbers) or not bool(torch.isfinite(numbers).all()):
        raise ValueError(f"alibi: slopes must be finite numbers of shape [heads], got {slopes!r}")
    return _alibi(tuple(numbers.tolist()))


@lru_cache(maxsize=1024, typed=True)
def _alibi(slopes: tuple[float, ...]) -> Variant:
    per_head = torch.tensor(slopes, dtype=torch.float32, device="cpu")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + per_head.to(score.device)[h] * (kv_idx - q_idx)

    return variant(score_mod, name=f"alibi({len(slopes)} heads)")


def rounded_alibi(slopes: Sequence[float], factor: float) -> Variant:
    """ALiBi as Falcon computes it, in bfloat16: each score gets ``factor * bfloat16(slope * bfloat16(kv_idx))``.

    A key's bias depends on its position, not on its distance alone: distant keys that round to the same position get
    the same bias.

    Args:
        slopes: The slope of each query head.
        factor: The factor on the bias.

    Raises:
        ValueError: there are no slopes; or they or the factor are not finite, or the factor is 0.
    """
    if not slopes or not all(map(math.isfinite, (*slopes, factor))) or not factor:
        raise ValueError(f"rounded_alibi: slopes and a factor other than 0 must be finite, got {slopes} and {factor}")
    return _rounded_alibi(tuple(map(float, slopes)), float(factor))


@lru_cache(maxsize=1024, typed=True)
def _rounded_alibi(slopes: tuple[float, ...], factor: float) -> Variant:
    per_head = torch.tensor(slopes, dtype=torch.float32, device="cpu")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = kv_idx.to(torch.bfloat16).to(torch.float32)
        return score + factor * (per_head.to(score.device)[h] * position).to(torch.bfloat16).to(torch.float32)

    return variant(score_mod, name=f"rounded_alibi({len(slopes)} heads, x {factor:g})")


def sigmoid() -> Variant:
    """The sigmoid of each score replaces the softmax: outputs are weighted sums, and the weight of a key does not
    depend on other keys (Ramapuram et al. 2024; FlashSigmoid).

    The log-sum-exp is the logarithm of the sum of the weights; outputs over parts of the keys add up.
    """
    return _SIGMOID


def _log_sigmoid(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(score)


_SIGMOID = replace(variant(_log_sigmoid, name="sigmoid"), sums=True)


def attention_sinks() -> Variant:
    """One learned logit per head is added to the softmax's denominator, so that a head can attend to nothing (Xiao et
    al. 2024, 3.3; as in GPT-OSS).

    The logits are an argument of the op, ``sinks [heads]``.
    """
    return _SINKS


_SINKS = Variant("attention_sinks", has_sinks=True)
