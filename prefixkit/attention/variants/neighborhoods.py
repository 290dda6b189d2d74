"""Neighborhood attention (NATTEN): each token of a canvas sees the tokens around it.

At a border the neighborhood is moved inwards until it lies on the canvas, so that all tokens see equally many
(Hassani et al. 2023, Neighborhood Attention Transformer, 3.1, whose figure 2 shows a corner).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from prefixkit.attention.variants.builtin import check_count
from prefixkit.attention.variants.variant import Variant, variant

Pair = tuple[int, int]


@lru_cache(maxsize=1024, typed=True)
def natten_1d(length: int, kernel: int) -> Variant:
    """Each of ``length`` tokens sees the ``kernel`` tokens around it (Hassani et al. 2023, 3.1).

    ValueError unless ``kernel`` is odd and at most ``length``.
    """
    near = _neighborhood("natten_1d", "length", length, kernel)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return near(q_idx, kv_idx)

    return variant(mask_mod=mask_mod, name=f"natten_1d({length}, {kernel})")


def natten_2d(height: int, width: int, kernel: int | Pair, *, tile: int | Pair = 8) -> Variant:
    """Each token of a canvas sees the neighborhood of size ``kernel`` around it (Hassani et al. 2023, 3.1); tokens are
    in the order of :func:`tile_order`.

    Args:
        height, width: Size of the canvas in tokens; the sequence is the canvas.
        kernel: Height and width of a neighborhood, both odd and at most the canvas's; or one number for both.
        tile: Height and width of a tile, which divide the canvas's; 1 for row-major order.

    Raises:
        ValueError: a size is not as described.
    """
    _check_tiles("natten_2d", height, width, _pair(tile))
    return _natten_2d((height, width), _pair(kernel), _pair(tile))


@lru_cache(maxsize=1024, typed=True)
def _natten_2d(canvas: Pair, kernel: Pair, tile: Pair) -> Variant:
    height, width = canvas
    above = _neighborhood("natten_2d", "height", height, kernel[0])
    beside = _neighborhood("natten_2d", "width", width, kernel[1])
    place = _tiled(width, tile) if tile != (1, 1) else lambda idx: (idx // width, idx % width)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        (q_row, q_column), (kv_row, kv_column) = place(q_idx), place(kv_idx)
        return above(q_row, kv_row) & beside(q_column, kv_column)

    sizes = " by ".join("x".join(map(str, pair)) for pair in (canvas, kernel))
    return variant(mask_mod=mask_mod, name=f"natten_2d({sizes}, tiles of {tile[0]}x{tile[1]})")


def tile_order(height: int, width: int, tile: int | Pair = 8) -> tuple[Tensor, Tensor]:
    """Compute an order of tokens by tiles, in which tokens that are close on the canvas are close in the sequence.

    Tiles are in row-major order, and so are the tokens of each tile: the mask then hides whole blocks of keys.

    Args:
        height, width, tile: As :func:`natten_2d` takes them.

    Returns:
        ``order, inverse``, ``[height * width]`` int64 each: ``tokens[order]`` converts tokens from row-major order to
        tile order, and ``tokens[inverse]`` back.

    Raises:
        ValueError: the tiles do not divide the canvas.
    """
    rows, columns = _pair(tile)
    _check_tiles("tile_order", height, width, (rows, columns))
    of = torch.arange(height * width, device="cpu").view(height // rows, rows, width // columns, columns)
    order = of.transpose(1, 2).reshape(-1)
    return order, order.argsort()


def _tiled(width: int, tile: Pair) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function that maps indices in tile order to row and column."""
    (rows, columns), across = tile, width // tile[1]

    def place(idx: Tensor) -> tuple[Tensor, Tensor]:
        number, within = idx // (rows * columns), idx % (rows * columns)
        return number // across * rows + within // columns, number % across * columns + within % columns

    return place


def _neighborhood(function: str, side: str, size: int, kernel: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that says whether a key is in the neighborhood of a query, along one side of the canvas."""
    check_count(function, side, size)
    check_count(function, "kernel", kernel)
    if kernel % 2 == 0 or kernel > size:
        raise ValueError(f"{function}: kernel must be odd and at most the {side}, {size}, got {kernel}")
    half, last = kernel // 2, size - kernel

    def near(q: Tensor, kv: Tensor) -> Tensor:
        first = (q - half).clamp(0, last)
        return (kv >= first) & (kv < first + kernel)

    return near


def _pair(sizes: int | Pair) -> Pair:
    return sizes if isinstance(sizes, tuple) else (sizes, sizes)


def _check_tiles(function: str, height: int, width: int, tile: Pair) -> None:
    for side, size, part in (("height", height, tile[0]), ("width", width, tile[1])):
        check_count(function, side, size)
        check_count(function, "tile", part)
        if size % part:
            raise ValueError(f"{function}: tiles must divide the {side}, {size}, got {part}; pad the canvas")
