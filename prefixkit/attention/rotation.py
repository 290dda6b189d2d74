"""Rotary embedding (Su et al. 2021) of queries that are rotated already: from one position to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """How the heads of a layer turn with their position.

    Attributes:
        frequencies: Radians a position, of each pair of elements that turns; the last elements of a head may not turn.
        interleaved: Pairs are neighbours; else element ``i`` and that as many behind it as there are pairs.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False


Angles = tuple[Tensor, Tensor]  # cosine and sine, [rows, 1, pairs] float32


def angles(frequencies: Tensor, positions: Tensor, target: Tensor) -> Angles:
    """Of what turns rows at ``positions [rows]`` to ``target [rows]``; ``frequencies [pairs]`` float32.

    Models compute ``position * frequency`` in float32, which at 100,000 is off by a hundredth of a radian: the
    difference is taken from the same number, so that it goes.
    """
    turned = target.double()[:, None] * frequencies.double() - (positions.float()[:, None] * frequencies).double()
    return turned.cos().float()[:, None], turned.sin().float()[:, None]


def rotate(x: Tensor, by: Angles, interleaved: bool) -> Tensor:
    """``x [rows, heads, head_dim]`` turned, in its dtype; products are float32 at least."""
    cos, sin = by
    pairs = cos.shape[2]
    turning, still = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        first, second = turning.reshape(*x.shape[:2], pairs, 2).unbind(3)
    else:
        first, second = turning.chunk(2, 2)
    turned = first * cos - second * sin, second * cos + first * sin
    made = torch.stack(turned, 3).flatten(2) if interleaved else torch.cat(turned, 2)
    made = made.to(x.dtype)
    return made if still.shape[2] == 0 else torch.cat((made, still), 2)
