"""The generator is Philox4x32-10, and a sample's numbers depend on nothing but the sample."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.sampling.rng import philox4x32, sample_key, uniforms


def words(text):
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


# The known answers that Random123 publishes for philox4x32, 10 rounds: counter, key, result.
KNOWN = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    assert philox4x32(words(counter), words(key)).tolist() == words(result).tolist()


def test_known_answers_all_at_once():
    counters, keys, results = (np.stack([words(row[column]) for row in KNOWN]) for column in range(3))
    np.testing.assert_array_equal(philox4x32(counters, keys), results)
    np.testing.assert_array_equal(philox4x32(counters[:, None], keys[None, :])[[0, 1, 2], [0, 1, 2]], results)


def test_uniform_uses_exactly_the_documented_bits():
    key, step = 0x299F31D0A4093822, 0x85A308D3243F6A88  # the words of the third vector, but for c2 and c3
    x = philox4x32(words("243f6a88 85a308d3 0 0"), words("a4093822 299f31d0")).tolist()
    expected = ((x[0] >> 5) * 2**26 + (x[1] >> 6)) / 2**53
    assert uniforms(np.array([key], dtype=np.uint64), np.array([step], dtype=np.uint64))[0] == expected
    first = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniforms(np.array([0], dtype=np.uint64), np.array([0]))[0] == first


def test_uniforms_do_not_depend_on_the_batch():
    keys = np.array([sample_key(7, index, [1, 2, 3]) for index in range(50)], dtype=np.uint64)
    steps = np.arange(50)
    together = uniforms(keys, steps)
    assert together.dtype == np.float64
    assert together.shape == (50,)
    alone = [uniforms(keys[[row]], steps[[row]])[0] for row in range(50)]
    assert together.tolist() == alone


def test_uniforms_are_uniform_and_below_1():
    key = sample_key(3, 0, [5])
    u = uniforms(np.full(100_000, key), np.arange(100_000))
    assert u.min() >= 0
    assert u.max() <= 1 - 2**-53
    counts, _ = np.histogram(u, bins=100, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 60 < chi_square < 150  # 99 degrees of freedom: outside with probability 1e-3
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.015
    # All ones in the words used: the largest number there is.
    assert ((2**32 - 1 >> 5) * 2.0**26 + (2**32 - 1 >> 6)) * 2.0**-53 < 1


def test_keys_differ_with_seed_index_and_prompt():
    prompts = [[1], [2], [1, 0], [0, 1], [1, 1], list(range(1000))]
    keys = {int(sample_key(seed, index, p)) for seed in (0, 1, 2**64 - 1) for index in (0, 1, 31) for p in prompts}
    assert len(keys) == 3 * 3 * len(prompts)


def test_keys_differ_with_the_occurrence_and_the_first_is_that_of_a_prompt_alone():
    prompts = [[1], [1, 1], [1, 1, 0], [1, 0, 0]]
    keys = {
        int(sample_key(seed, index, p, n)) for seed in (0, 1) for index in (0, 1) for p in prompts for n in (0, 1, 9)
    }
    assert len(keys) == 2 * 2 * 3 * len(prompts)
    assert sample_key(4, 5, [6, 7], 0) == sample_key(4, 5, [6, 7])


def test_keys_do_not_depend_on_how_the_prompt_is_held():
    tokens = [5, 70_000, 3]
    expected = sample_key(1, 2, tokens)
    assert isinstance(expected, np.uint64)
    strided = np.array([5, 0, 70_000, 0, 3, 0])[::2]
    for same in (np.array(tokens, dtype=np.int32), np.array(tokens), strided, tuple(tokens)):
        assert sample_key(1, 2, same) == expected
    assert sample_key(0, 0, [0]) == 8367686147607930370  # what a published seed sampled must not change
