"""Digests of memory: any change of a word changes them."""

from __future__ import annotations

import pytest
import torch

import prefixkit.backends
import prefixkit.ops.library  # noqa: F401  (declares the op, which backends compute)
from prefixkit.ops.arguments import BadDtype, BadShape

digest = torch.ops.prefixkit.digest


def of(words: torch.Tensor, start: int = 0) -> int:
    total = torch.zeros(1, dtype=torch.int64)
    digest(words, start, total)
    return int(total)


@pytest.mark.parametrize("count", [1, 7, 70001])  # of these the last is more than is added at a time
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
def test_a_changed_word_and_words_in_another_order_change_a_digest(dtype, count):
    seed = torch.seed() % 2**32
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 255, (count,), generator=generator).to(dtype)
    before, at = of(words), int(torch.randint(count, (1,), generator=generator))
    assert of(words) == before and of(words, 5) != before
    words[at] += 1
    assert of(words) != before
    words[at] -= 1
    if words[0] != words[-1]:
        words[[0, -1]] = words[[-1, 0]]
        assert of(words) != before


@pytest.mark.parametrize("count", [8, 16, 64])
def test_other_signs_of_all_numbers_change_a_digest(count):
    """Each word changes by one of two numbers then: a sum of multiples of one number would be 0 once in 200 times."""
    seed = torch.seed() % 2**32
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    for start in range(1000):
        numbers = torch.randn(2 * count, generator=generator)
        assert of(numbers.view(torch.int64), start) != of((-numbers).view(torch.int64), start)


def test_digests_are_added():
    total = torch.full((1,), 9, dtype=torch.int64)
    digest(torch.tensor([3]), 0, total)
    assert int(total) - 9 == of(torch.tensor([3])) and of(torch.empty(0, dtype=torch.int64)) == 0


def test_opcheck_and_what_is_refused():
    words, total = torch.arange(5), torch.zeros(1, dtype=torch.int64)
    torch.library.opcheck(digest.default, (words, 0, total))
    with pytest.raises(BadDtype, match=r"words must be torch\.int64"):
        digest(words.float(), 0, total)
    with pytest.raises(BadShape, match="contiguous"):
        digest(words[::2], 0, total)
    with pytest.raises(BadShape, match=r"total must have shape \[1\]"):
        digest(words, 0, words)
