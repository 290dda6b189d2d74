"""What a memory policy takes, and sizes as people write them."""

import numpy as np
import pytest

from prefixkit.engine.policy import MemoryPolicy
from prefixkit.kv.limits import parse_size


@pytest.mark.parametrize("size", [4 * 2**30, "4GiB", np.int64(4 * 2**30), "4096 MiB", 4.0 * 2**30])
def test_swap_space_is_a_size_as_the_kv_budget_is(size):
    assert MemoryPolicy(swap_space=size).swap_space == MemoryPolicy().swap_space == 2**32


def test_numbers_of_numpy_are_numbers():
    assert MemoryPolicy(headroom=np.int64(8), patience=np.uint8(9)) == MemoryPolicy(headroom=8, patience=9)
    assert MemoryPolicy(headroom=0, swap_space=0, patience=0).swap_space == 0


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"eviction": "fifo"}, ValueError, "eviction must be one of 'lru', 'lfu', 'cost', got 'fifo'"),
        ({"preemption": "drop"}, ValueError, "preemption must be one of 'auto', 'swap', 'recompute', got 'drop'"),
        ({"swap_space": -1}, ValueError, "swap_space must be at least 0, got -1; use 0"),
        ({"swap_space": "4 gigs"}, ValueError, 'swap_space: a size must look like "2GiB".* got "4 gigs"'),
        ({"swap_space": None}, TypeError, "swap_space: a size must look like .* got NoneType None"),
        ({"headroom": -1}, ValueError, "headroom must be at least 0, got -1"),
        ({"patience": 1.5}, TypeError, "patience must be an integer, got float 1.5"),
        ({"patience": True}, TypeError, "patience must be an integer, got bool True"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        MemoryPolicy(**fields)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5gb", 1_500_000_000),
        ("64kib", 65_536),
        ("1048576", 2**20),
        (" 7B ", 7),
        (2**31, 2**31),
        (np.int64(7), 7),
        (1.5e9, 1_500_000_000),
    ],
)
def test_a_size_is_a_number_and_a_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("size", [0, "0", "0 GiB"])
def test_no_swap_space_may_be_written_as_people_do(size):
    assert MemoryPolicy(swap_space=size).swap_space == 0


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "0", "1e9", "2GiB!", "1,5GB", "0.4B", "0.0001 KiB"])
def test_any_other_text_is_no_size(text):
    with pytest.raises(ValueError, match="a size must look like"):
        parse_size(text)


def test_a_message_names_what_was_given_and_where():
    with pytest.raises(ValueError, match=r'--kv-budget: a size must look like "2GiB".* bytes, got "2 gigs"'):
        parse_size("2 gigs", "--kv-budget")
    with pytest.raises(TypeError, match=r"kv_budget: a size must .* got bool True"):
        parse_size(True)
    with pytest.raises(ValueError, match=r"kv_budget: .* got inf"):
        parse_size(float("inf"))
