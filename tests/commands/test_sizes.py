"""Sizes as people write them."""

import pytest

from prefixkit.commands.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5gb", 1_500_000_000),
        ("64kib", 65_536),
        ("1048576", 2**20),
        (" 7B ", 7),
    ],
)
def test_a_number_and_a_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "0", "1e9", "2GiB!", "1,5GB", "0.4B", "0.0001 KiB"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="a size must look like"):
        parse_size(text)
