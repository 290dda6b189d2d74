"""Random arguments of ``rotary_append``, and what it must make of them."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fresh_rng() -> np.random.Generator:
    """A generator with a random seed; pytest shows it where a test fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    return np.random.default_rng(seed)


def nan_pages(
    shape: tuple[int, int, int, int], dtype: torch.dtype, head_major: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """K and V pages of the middle one of three layers, and all of it, full of NaN; laid out as ``KVPool`` does."""
    num_pages, page_size, kv_heads, head_dim = shape
    inner = (kv_heads, page_size) if head_major else (page_size, kv_heads)
    pool = torch.full((2, 3, num_pages, *inner, head_dim), torch.nan, dtype=dtype)
    pages = pool[:, 1].transpose(2, 3) if head_major else pool[:, 1]
    return pages[0], pages[1], pool


def random_rows(
    rng: np.random.Generator,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """q, key, value, cos and sin: parts of one projection, and of one tensor of angles, with NaN on both sides.

    The halves of cos and of sin are not alike, so that none can stand for another.
    """
    all_heads, pad = heads + 2 * kv_heads, 16 // dtype.itemsize
    wide = torch.full((tokens, all_heads * head_dim + 2 * pad), torch.nan, dtype=dtype)
    wide[:, pad:-pad] = torch.from_numpy(rng.standard_normal((tokens, all_heads * head_dim)))
    angles = torch.full((tokens, 2 * head_dim + 3 * pad), torch.nan, dtype=dtype)
    for at, function in ((pad, np.cos), (2 * pad + head_dim, np.sin)):
        turn = rng.uniform(0, 2 * np.pi, (tokens, head_dim))
        angles[:, at : at + head_dim] = torch.from_numpy(function(turn))
    wide, angles = wide.to(device), angles.to(device)
    parts = wide[:, pad:-pad].unflatten(1, (all_heads, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    return [*parts, angles[:, pad : pad + head_dim], angles[:, 2 * pad + head_dim : -pad]]


def random_slots(rng: np.random.Generator, tokens: int, num_slots: int) -> Tensor:
    """Distinct, in any order."""
    return torch.from_numpy(rng.permutation(num_slots)[:tokens])


def exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float64: a pair of numbers half a head apart, turned."""
    (a, b), (c, d), (s, t) = (part.double().chunk(2, dim=-1) for part in (x, cos[:, None], sin[:, None]))
    return torch.cat((a * c - b * s, b * d + a * t), dim=-1)


def eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models write it, every product and sum in the dtype."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


def check_error(ours: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Neither the largest error nor its norm is above 1.5 times that of the same numbers in eager torch."""
    truth = exact(x, cos, sin)
    assert ours.shape == x.shape and ours.dtype == x.dtype
    mine, theirs = ((turned.double() - truth).abs() for turned in (ours, eager(x, cos, sin)))
    assert mine.max() <= 1.5 * theirs.max()
    assert mine.norm() <= 1.5 * theirs.norm()


def check_bound(ours: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """No number is further off than two products and a sum, each rounded, can be: few numbers, and fused products."""
    (a, b), (c, d), (s, t) = (part.double().chunk(2, dim=-1) for part in (x, cos[:, None], sin[:, None]))
    truth, unit = exact(x, cos, sin), torch.finfo(x.dtype).eps / 2
    products = torch.cat(((a * c).abs() + (b * s).abs(), (b * d).abs() + (a * t).abs()), dim=-1)
    assert ((ours.double() - truth).abs() <= unit * (products * (1 + unit) + truth.abs())).all()


def bits(x: Tensor) -> Tensor:
    """As whole numbers, so that NaN equals itself and 0 is not -0."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
