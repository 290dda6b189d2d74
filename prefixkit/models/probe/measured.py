"""The tokens of a probe, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.kv.state_pool import States

ORDER = (0, 1, 2, 0)  # positions in a step: the last token is the first once more, at its position
ROWS = len(ORDER)  # tokens of a pass
TOKENS = ROWS - 1  # of the text of a step


@dataclass(frozen=True)
class Probed:
    """What a model's attention layers do.

    Attributes:
        layers: The kind of each.
        counts_from_zero: Keys are the same without position_ids as with those that count from 0.
        takes_offsets: The model takes no positions, and counts them from the number of tokens that the cache holds,
            which may be one for each row.
        asks_positions: The model keeps positions of all tokens in its cache.
        scales_padded: Queries or what is added to scores change with the number of tokens before, padding included.
        numbers: Of these layers in the model, where others lie between them.
        states: Of each module that keeps a state, what it keeps of a sequence.
    """

    layers: tuple[LayerKind, ...]
    counts_from_zero: bool = True
    numbers: tuple[int, ...] = ()
    states: States = ()
    asks_positions: bool = False
    takes_offsets: bool = False
    scales_padded: bool = False


class Enough(Exception):
    """The first layer was seen."""


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Far closer than rows of other tokens or positions, if not equal: a product of other rows may round otherwise."""
    error, size = (one - other).abs().max(), one.abs().max()
    return bool(error <= torch.finfo(dtype).eps ** 0.5 * size)


def are_same(cached: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> bool:
    """Whether these are the very same tensors."""
    return len(cached) == len(given) and all(one is other for one, other in zip(cached, given, strict=True))
