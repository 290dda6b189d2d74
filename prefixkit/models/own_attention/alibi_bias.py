"""The variants of ALiBi that classes use, with the slopes that the classes' own files compute.

Each variant is made once: a captured step must not wait for slopes, and one object has one registered key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from prefixkit.attention.variants import Variant, alibi, rounded_alibi
from prefixkit.models.layered_cache import Bias
from prefixkit.models.own_attention.own_code import function_of_module
from prefixkit.threads import once


def linear_bias(module: nn.Module, heads: int) -> Bias:
    """ALiBi by ``build_alibi_tensor`` of Bloom's file."""
    return partial(_linear, function_of_module(module, "build_alibi_tensor"), heads)


def mpt_bias(module: nn.Module, heads: int) -> Bias:
    """ALiBi by ``build_mpt_alibi_tensor`` of MPT's file."""
    return partial(_mpt, function_of_module(module, "build_mpt_alibi_tensor"), heads)


def rounded_bias(module: nn.Module, heads: int, factor: float) -> Bias:
    """ALiBi by ``build_alibi_tensor`` of Falcon's file, rounded to bfloat16; ``factor`` times it is added to scores."""
    return partial(_rounded, function_of_module(module, "build_alibi_tensor"), heads, factor)


@once
def _linear(build: Callable[..., Tensor], heads: int) -> Variant:
    return alibi(_bias_of_the_second_token(build, heads))


@once
def _mpt(build: Callable[..., Tensor], heads: int) -> Variant:
    return alibi(-build(heads, 2, device="cpu")[:, 0, 0])  # the bias of the token before the last


@once
def _rounded(build: Callable[..., Tensor], heads: int, factor: float) -> Variant:
    return rounded_alibi(_bias_of_the_second_token(build, heads).tolist(), factor)


def _bias_of_the_second_token(build: Callable[..., Tensor], heads: int) -> Tensor:
    two = torch.ones(1, 2, dtype=torch.int64, device="cpu")
    return build(two, heads, torch.float32)[:, 0, 1]
