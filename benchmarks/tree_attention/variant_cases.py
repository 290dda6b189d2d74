"""Variants by name, in the forms of FlexAttention and of prefixkit, and plain batches in FlexAttention's layout.

Functions are written for positions in a sequence.  A variant without a mask is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixkit.attention.variants import CAUSAL, Variant, variant

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Numbers:
    """Values that the functions capture: sizes in tokens, but ``grid`` and ``natten`` in points along a side."""

    window: int = 1024
    prefix: int = 1024
    cap: float = 30.0
    steepest: float = 1.0  # ALiBi's first head would have this slope times 2 ** (-8 / heads)
    documents: int = 16
    grid: int = 128
    natten: tuple[int, ...] = (13, 33)
    tile: int = 8


# Other values of the same functions: kernels must not be compiled for them.
OTHER = Numbers(window=1000, prefix=700, cap=20.0, steepest=0.5, documents=11, natten=(11, 31))
# The eight of the paper: the seven that it evaluates (section 6.1), and neighborhood attention (appendix A.1).
PAPER = (
    *("noop", "causal", "alibi", "window", "prefix-lm", "soft-cap", "document", "natten 13"),
    *("soft-cap approximate", "sigmoid approximate"),
)


@dataclass(frozen=True, eq=False)
class Mods:
    """Functions of one variant; ``base`` names the variant with which its time is compared; ``approximate``: with the
    hardware's tanh.
    """

    score: ScoreMod | None = None
    mask: MaskMod | None = None
    base: str = "causal"
    approximate: bool = False

    def variant(self, name: str) -> Variant:
        """The variant in prefixkit's form."""
        if self.score is None and self.mask is None:
            return CAUSAL
        return variant(self.score, self.mask, name=name, approximate=self.approximate)

    def at(self, first_query: int) -> tuple[ScoreMod | None, MaskMod]:
        """The variant in FlexAttention's form, which numbers queries from 0; here they begin at ``first_query``."""
        score, mask = self.score, self.mask or causal
        if not first_query:
            return score, mask

        def score_mod(x: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score(x, b, h, q_idx + first_query, kv_idx)  # type: ignore[misc]  # used where there is one

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mask(b, h, q_idx + first_query, kv_idx)

        return None if score is None else score_mod, mask_mod


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= q_idx


def noop(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx >= 0


def window(size: int) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < size)

    return mask_mod


def prefix_lm(size: int) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < size) | (kv_idx <= q_idx)

    return mask_mod


def document(numbers: Tensor) -> MaskMod:
    """Causal within the document of each position."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (numbers[q_idx] == numbers[kv_idx]) & (kv_idx <= q_idx)

    return mask_mod


def alibi(slopes: Tensor) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def soft_cap(cap: float) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def sigmoid(cap: float) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.sigmoid(score)

    return score_mod


def natten(grid: int, size: int, tile: int) -> MaskMod:
    """Neighborhood attention over ``grid x grid`` points, in tiles of ``tile x tile``, row by row within each.

    Every point sees ``size x size`` points: those around it, or around the nearest point that is ``size // 2`` from all
    edges (Hassani et al. 2023).
    """
    half, area, across = size // 2, tile * tile, grid // tile

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_y = q_idx // area // across * tile + q_idx % area // tile
        q_x = q_idx // area % across * tile + q_idx % tile
        kv_y = kv_idx // area // across * tile + kv_idx % area // tile
        kv_x = kv_idx // area % across * tile + kv_idx % tile
        near_y = (torch.clamp(q_y, half, grid - 1 - half) - kv_y).abs() <= half
        near_x = (torch.clamp(q_x, half, grid - 1 - half) - kv_x).abs() <= half
        return near_y & near_x

    return mask_mod


def slopes_of(heads: int, steepest: float, device: torch.device | str) -> Tensor:
    """``[heads]`` float32: ALiBi's (Press et al. 2022), for a power of two of heads."""
    return steepest * 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)


def documents_of(positions: int, count: int, device: torch.device | str) -> Tensor:
    """``[positions]`` int32 the document of each position: ``count`` of them, which end at random places."""
    generator = torch.Generator().manual_seed(count)
    ends = torch.randperm(positions - 1, generator=generator)[: count - 1] + 1
    begins = torch.zeros(positions, dtype=torch.int32).index_fill_(0, ends, 1)
    return begins.cumsum(0, dtype=torch.int32).to(device)


def mods_of(numbers: Numbers, heads: int, positions: int, device: torch.device | str) -> dict[str, Mods]:
    """Every variant by name, for sequences of up to ``positions`` tokens; ``natten`` is for prompts of grid x grid."""
    slopes = slopes_of(heads, numbers.steepest, device)
    of_document = documents_of(positions, numbers.documents, device)
    capped, windowed = soft_cap(numbers.cap), window(numbers.window)
    sides = zip(Numbers.natten, numbers.natten, strict=True)  # names do not follow the numbers
    neighbors = {f"natten {name}": natten(numbers.grid, size, numbers.tile) for name, size in sides}
    return {
        "causal": Mods(),
        "noop": Mods(mask=noop),
        "window": Mods(mask=windowed),
        "prefix-lm": Mods(mask=prefix_lm(numbers.prefix)),
        "document": Mods(mask=document(of_document)),
        "alibi": Mods(alibi(slopes)),
        "soft-cap": Mods(capped),
        "sigmoid": Mods(sigmoid(numbers.cap)),
        "soft-cap approximate": Mods(capped, approximate=True),
        "sigmoid approximate": Mods(sigmoid(numbers.cap), approximate=True),
        "soft-cap + window": Mods(capped, windowed),
        **{name: Mods(mask=mask, base="noop") for name, mask in neighbors.items()},
    }


def visible_blocks(
    mask: MaskMod, queries: int, first_query: int, keys: int, block: tuple[int, int], device: str
) -> float:
    """The share of blocks ``(queries, keys)`` of which a mask shows at least one score."""
    q = torch.arange(-(-queries // block[0]) * block[0], device=device).clamp(max=queries - 1) + first_query
    kv = torch.arange(-(-keys // block[1]) * block[1], device=device).clamp(max=keys - 1)
    zero, seen, blocks = torch.zeros((), dtype=torch.int64, device=device), 0, 0
    for rows in q.split(64 * block[0]):
        shown = mask(zero, zero, rows[:, None], kv).expand(len(rows), len(kv))
        found = shown.reshape(-1, block[0], len(kv) // block[1], block[1]).any(3).any(1)
        seen, blocks = seen + int(found.sum()), blocks + found.numel()
    return seen / blocks
