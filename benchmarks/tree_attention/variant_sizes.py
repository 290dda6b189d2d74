"""Sizes of the benchmark of variants, and small ones that take seconds on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.tree_attention.variant_cases import OTHER, Numbers
from benchmarks.tree_attention.variant_inputs import Heads, Plain


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure."""

    heads: Heads
    numbers: Numbers
    other: Numbers
    plain: dict[str, Plain]
    trees: tuple[str, ...]
    tree_prompts: tuple[int, int, int]  # tokens of each, prompts, tokens that they share
    errors: int  # tokens of a prompt: a square


FULL = Sizes(
    Heads(),
    Numbers(),
    OTHER,
    {"prompt of 16K": Plain(1, 16384, 16384), "decode 16 x 1K": Plain(16, 1024, 1)},
    ("2L b64 p2048 s128", "beam d6", "comb d64 b8 t64 s128"),
    (1024, 16, 4096),
    1024,
)
TINY = Sizes(
    Heads(4, 2, 32),
    Numbers(window=40, prefix=30, documents=5, grid=16, natten=(3, 5), tile=4),
    Numbers(window=30, prefix=20, cap=20.0, steepest=0.5, documents=3, grid=16, natten=(5, 3), tile=4),
    {"prompt of 256": Plain(1, 256, 256), "decode 4 x 64": Plain(4, 64, 1)},
    ("2L b4 p64 s16", "comb d4 b2 t16 s32"),
    (32, 3, 64),
    256,
)
