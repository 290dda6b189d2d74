"""Token arrays at the public edge, and where two of them first differ."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.tree.tokens import LAST_WINDOW, as_tokens, common_prefix


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 1, 4],
        (3, 1, 4),
        range(3, 6),
        np.array([3, 1, 4], np.uint8),
        np.array([3, 1, 4], np.int64),
        np.array([3, 9, 1, 9, 4, 9], np.int32)[::2],
        [2**31 - 1],
    ],
    ids=repr,
)
def test_anything_that_holds_integers_will_do(tokens: object) -> None:
    result = as_tokens(tokens)  # type: ignore[arg-type]
    assert result.dtype == np.int32
    assert result.tolist() == list(tokens)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([], ValueError, "must not be empty"),
        (np.empty(0, np.int32), ValueError, "must not be empty"),
        ([[1, 2]], ValueError, "one-dimensional"),
        (7, ValueError, "one-dimensional"),
        ([1, -1], ValueError, "negative, got -1"),
        ([2**31], ValueError, "below 2\\*\\*31, got 2147483648"),
        (np.array([2**32 - 1], np.uint32), ValueError, "below 2\\*\\*31"),
        ([1.0, 2.0], TypeError, "integers, got dtype float64"),
        ([True], TypeError, "integers, got dtype bool"),
        (["a"], TypeError, "integers"),
        ([2**80], TypeError, "integers"),
    ],
    ids=repr,
)
def test_anything_else_is_refused(tokens: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_tokens(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1000, LAST_WINDOW, 3 * LAST_WINDOW + 5])
def test_common_prefix_finds_the_first_difference(length: int) -> None:
    left = np.arange(length, dtype=np.int32)
    for place in {0, 1, length // 2, 255, 256, 257, length - 1}:
        if place < length:
            right = left.copy()
            right[place] += 1
            right[place + 1 :: 7] += 1
            assert common_prefix(left, right) == place
            assert common_prefix(left, left[:place]) == common_prefix(left[:place], left) == place
    assert common_prefix(left, left) == length
