"""Rotary embedding (Su et al. 2021): rotate queries again, from the position they are rotated for to another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates the elements of a head by its position.

    Attributes:
        frequencies: Radians per position for each rotated pair of elements; a head's last elements may be unrotated.
        interleaved: Whether pairs are adjacent elements; else element ``i`` is paired with ``i + pairs``.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False


Angles = tuple[Tensor, Tensor]  # cosine and sine, [rows, 1, pairs] float32


def angles(frequencies: Tensor, positions: Tensor, target: Tensor) -> Angles:
    """The angles that rotate rows from ``positions [rows]`` to ``target [rows]``; ``frequencies [pairs]`` float32.

    Models compute ``position * frequency`` in float32, which at position 100,000 is off by a hundredth of a radian.  We
    subtract the same rounded product, so that this error cancels.
    """
    turned = target.double()[:, None] * frequencies.double() - (positions.float()[:, None] * frequencies).double()
    return turned.cos().float()[:, None], turned.sin().float()[:, None]


def rotate(x: Tensor, by: Angles, interleaved: bool) -> Tensor:
    """Rotate ``x [rows, heads, head_dim]``; the result has its dtype, products are at least float32."""
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
