"""Rows and parameters of all kinds for tests of sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.sampling.params import SamplingParams


def random_params(rng: np.random.Generator, rows: int, vocab: int) -> list[SamplingParams]:
    """Every mix of penalty, temperature and filters, each absent in half of the rows."""

    def pick(default: float, *choices: float) -> float:
        return default if rng.random() < 0.5 else float(choices[rng.integers(len(choices))])

    return [
        SamplingParams(
            repetition_penalty=pick(1.0, 0.7, 1.3, 5.0),
            temperature=pick(1.0, 0.0, 0.1, 0.7, 1.3, 20.0),
            top_k=int(pick(0, 1, 2, 40, 300, vocab // 2 + 1, vocab, vocab - 1)),
            top_p=pick(1.0, 1e-6, 0.1, 0.5, 0.95, 0.99999, rng.uniform(0.01, 1)),
            min_p=pick(0.0, 1e-9, 0.02, 0.3, 0.99),
        )
        for _ in range(rows)
    ]


def rows_of(rng: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """``[rows, vocab]``: spread and flat, with ties, with masked tokens, with a few likely tokens among many."""
    made = []
    for row in range(rows):
        x = rng.standard_normal(vocab) * rng.choice([0.05, 1.0, 3.0, 10.0])
        kind = row % 4
        if kind == 1:
            x = np.round(x)
        elif kind == 2:
            x[rng.random(vocab) < 0.6] = -np.inf
            x[rng.integers(vocab)] = 1.5
        elif kind == 3:
            x[rng.integers(0, vocab, 3)] += 12
        made.append(x)
    return torch.from_numpy(np.array(made)).to(dtype)


def masked_case(
    rng: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype
) -> tuple[Tensor, list[SamplingParams], list[NDArray[np.int64] | None]]:
    """Logits, parameters, and the tokens that a grammar allows: all, none, one, a few, most of them."""
    allowed: list[NDArray[np.int64] | None] = []
    for row in range(rows):
        some = np.flatnonzero(rng.random(vocab) < (0, 0, 0, 0.02, 0.99)[row % 5]).astype(np.int64)
        some = np.union1d(some, rng.integers(0, vocab, 1)) if row % 5 > 1 else some
        allowed.append(None if row % 5 == 0 else some)
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)) * 3).to(dtype)
    return logits, random_params(rng, rows, vocab), allowed


def _with(vocab: int, rest: float, places: dict[int, float]) -> Tensor:
    row = torch.full((vocab,), rest)
    for place, value in places.items():
        row[place] = value
    return row[None]


NASTY: dict[str, Callable[[int], Tensor]] = {
    "all equal": lambda vocab: torch.zeros(1, vocab),
    "zeros of both signs": lambda vocab: torch.where(torch.arange(vocab) % 2 == 0, 0.0, -0.0)[None],
    "all equal and large": lambda vocab: torch.full((1, vocab), 3e38),
    "one finite": lambda vocab: _with(vocab, -torch.inf, {vocab - 1: -5.0}),
    "far apart": lambda vocab: _with(vocab, -3e38, {3: 3e38, 7: 3e38}),
    "subnormal": lambda vocab: torch.arange(vocab)[None] * 1e-44,
    "one weight of 1": lambda vocab: _with(vocab, -27.0, {vocab // 2: 0.0}),
    "first and last": lambda vocab: _with(vocab, -500.0, {0: 1.0, vocab - 1: 1.0}),
    "negative": lambda vocab: -torch.arange(1, vocab + 1).float()[None],
}


def logprob_bound(exact: np.ndarray, vocab: int) -> np.ndarray:
    """A bound of the difference between a log-softmax in float32 and the one in float64.

    The errors, in units of 2**-24, relative to the sum: each exponential has the errors of its difference, product and
    constant (3 times the difference, whose mean over the distribution is at most ln V, plus 4 for the function); each
    thread of the smallest cluster, one block, adds V / 1,024 groups of four, and a warp adds its lanes (7 more).  The
    result rounds once.
    """
    bound: np.ndarray = 2**-24 * (3 * math.log(vocab) + 4 + vocab / 1024 + 1 + 7 + np.abs(exact))
    return bound


def _normal(rng: np.random.Generator, vocab: int) -> np.ndarray:
    return rng.standard_normal(vocab)


# Rows whose nuclei end among many tokens of about the same weight.
FLAT: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": _normal,
    "nearly equal": lambda rng, vocab: _normal(rng, vocab) * 1e-3,
    "a few values": lambda rng, vocab: np.round(_normal(rng, vocab) * 4) / 4,
    "two values": lambda rng, vocab: np.where(np.arange(vocab) % 2, 0.0, -8.0),
    "in order": lambda rng, vocab: np.sort(_normal(rng, vocab)),  # tokens at the border are adjacent
    "likely tokens apart": lambda rng, vocab: np.where(np.arange(vocab) % 500 == 7, 12.0, _normal(rng, vocab)),
}


def flat_case(
    rng: np.random.Generator, name: str, vocab: int, dtype: torch.dtype
) -> tuple[Tensor, list[SamplingParams]]:
    """Logits ``[rows, vocab]`` and parameters with all kinds of top-p, alone and with min-p."""
    params = [SamplingParams(top_p=p) for p in (0.05, 0.5, 0.95, 0.9999, 1 - 1e-9)]
    # In rows of two values, half of the likelier tokens, and up to a part in 10^4 more or fewer, so that the borders
    # differ by less than the rounding of sums.
    half = 1 / (1 + math.exp(-8.0))
    params += [SamplingParams(top_p=half * (1 + part)) for part in (-1e-4, -1e-7, 1e-7, 1e-4)]
    params += [SamplingParams(top_p=0.9, min_p=least) for least in (1e-9, 0.05, 0.5)]
    rows = np.array([FLAT[name](rng, vocab) for _ in params])
    return torch.from_numpy(rows).to(dtype), params
