"""What the op ``sample`` reads for a row: a record of sampling parameters, and a bit for each token of its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.sampling.params import SamplingParams

# ``backends.cuda.layouts`` makes the kernel's struct from this dtype.
RECORD = np.dtype(
    [
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("key", "<u8"),
        ("temperature", "<f4"),
        ("penalty", "<f4"),
        ("top_k", "<i4"),
        ("step", "<i4"),
        ("active", "<i4"),
        ("masked", "<i4"),  # 1: a grammar limits which tokens may be sampled
    ]
)
RECORD_INTS = RECORD.itemsize // 4
STEP, ACTIVE = 9, 10  # as int32 columns

MOST_VOCAB = 2**20  # logits of a row


def records(
    params: Sequence[SamplingParams], keys: NDArray[np.uint64], steps: NDArray[np.integer[Any]]
) -> NDArray[np.int32]:
    """``[rows, RECORD_INTS]`` records of parameters, keys, and the number of tokens that each row has sampled."""
    different = {id(each): each for each in params}  # few, because rows of one request share their parameters
    table = np.zeros(len(different), dtype=RECORD)
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
        for name in ("temperature", "top_p", "min_p"):
            table[name] = [getattr(each, name) for each in different.values()]
        table["penalty"] = [each.repetition_penalty for each in different.values()]
    table["top_k"] = [min(each.top_k, MOST_VOCAB) for each in different.values()]
    table["masked"] = [each.grammar is not None for each in different.values()]
    index = {one: i for i, one in enumerate(different)}
    table = table[[index[id(each)] for each in params]]
    table["key"], table["step"], table["active"] = keys, steps, 1
    return table.view(np.int32).reshape(len(params), RECORD_INTS)


@dataclass(frozen=True)
class RecordedParams(SamplingParams):
    """Sampling parameters from a record: they were checked first, then rounded to the types of the record."""

    def __post_init__(self) -> None:
        """No checks: the least temperature, rounded to float32, is a little below the least that users may set."""


def params_of(table: NDArray[np.void]) -> list[SamplingParams]:
    """The parameters that records of dtype :data:`RECORD` hold."""
    params = table.copy()
    params["key"] = params["step"] = 0
    return list(_params_of(params.tobytes()))


@lru_cache(maxsize=64)  # steps repeat the parameters of their rows
def _params_of(rows: bytes) -> tuple[SamplingParams, ...]:
    table = np.frombuffer(rows, RECORD)
    names = "temperature", "top_k", "top_p", "min_p", "penalty"
    return tuple(_recorded(*row) for row in zip(*(table[name].tolist() for name in names), strict=True))


@lru_cache(maxsize=4096)  # rows of one request share their parameters
def _recorded(temperature: float, top_k: int, top_p: float, min_p: float, penalty: float) -> SamplingParams:
    return RecordedParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)


def words(vocab: int) -> int:
    """The number of 32-bit words that hold a bit for each token."""
    return -(-vocab // 32)


def mask(history: NDArray[np.integer[Any]], vocab: int) -> NDArray[np.int32]:
    """``[words]`` a bit for each token of a sequence, except for ids beyond the vocabulary, which are never sampled."""
    held = np.zeros(32 * words(vocab), dtype=bool)
    ids = np.asarray(history, dtype=np.int64)
    held[ids[ids < vocab]] = True
    return np.packbits(held, bitorder="little").view(np.int32)


def tokens_of(mask: NDArray[np.int32]) -> NDArray[np.int64]:
    """The tokens, ascending, whose bits are set in ``mask [words]``."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
