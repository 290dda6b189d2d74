"""The tokens of a probe, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.kv.state_pool import States

ORDER = (0, 1, 2, 0)  # positions in a step: the last row repeats the first token at its position
ROWS = len(ORDER)  # tokens of a pass
TOKENS = ROWS - 1  # of the text of a step


@dataclass(frozen=True)
class Probed:
    """What a model's attention layers do.

    Attributes:
        layers: The kind of each layer.
        counts_from_zero: Keys are the same without position_ids as with position_ids that count from 0.
        takes_offsets: The model has no argument for positions, and counts them from the number of tokens that the
            cache reports, which may differ per row.
        asks_positions: The model keeps positions of all tokens in its cache.
        scales_padded: Queries or the bias on scores change with the number of tokens before, padding included.
        numbers: The layers' numbers in the model's cache if other layers lie between them; else empty.
        computed_by: The number of the module that computes each layer if one computes several, as in a looped model;
            else empty.
        is_spread: The model's weights lie on several devices.
        positions: Positions in the table of positions that the model has learned; None: it has none.
        states, state_devices: For each module that keeps a state, and each of its calls in a step, the tensors that it
            keeps per sequence, and where.
        state_calls: How often each of these modules runs in a step if any runs several times; else empty.
    """

    layers: tuple[LayerKind, ...]
    counts_from_zero: bool = True
    numbers: tuple[int, ...] = ()
    computed_by: tuple[int, ...] = ()
    states: States = ()
    asks_positions: bool = False
    takes_offsets: bool = False
    scales_padded: bool = False
    is_spread: bool = False
    state_devices: tuple[torch.device, ...] = ()
    state_calls: tuple[int, ...] = ()
    positions: int | None = None


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows are equal up to rounding, which may differ between matrix products of different rows."""
    error, size = (one - other).abs().max(), one.abs().max()
    return bool(error <= torch.finfo(dtype).eps ** 0.5 * size)


def are_same(cached: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> bool:
    """Whether these are the very same tensors."""
    return len(cached) == len(given) and all(one is other for one, other in zip(cached, given, strict=True))
