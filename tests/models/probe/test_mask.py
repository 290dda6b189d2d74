"""The window that a mask shows: masks of 10 tokens, the last 3 of them queries."""

from __future__ import annotations

import pytest
import torch

from prefixkit.models.probe.mask import UnknownMask, chunk_of, shown_by, window_of


def mask_of(window=None):
    query, key = torch.arange(7, 10)[:, None], torch.arange(10)
    shown = key <= query
    return (shown if window is None else shown & (key > query - window))[None, None]


@pytest.mark.parametrize("told", [None, 1, 3, 20])
@pytest.mark.parametrize("window", [None, 1, 4, 9])
def test_the_window_is_the_masks_whatever_the_function_is_told(window, told):
    hidden = ~mask_of(window)
    masks = [
        torch.zeros(hidden.shape, dtype=to).masked_fill(hidden, torch.finfo(to).min)
        for to in (torch.float32, torch.half)
    ]
    for mask in (~hidden, torch.zeros(1, 2, 3, 10).masked_fill(hidden, -torch.inf), *masks):
        shows_no_other = window is None and told == 20
        for read in (mask, shown_by(mask, 7, 3)):
            assert window_of(read, 7, 3, told) == (20 if shows_no_other else window)


def test_where_the_function_makes_the_mask_the_window_is_what_it_is_told():
    assert window_of(None, 7, 3, 4) == window_of(torch.ones(1, 10), 7, 3, 4) == 4


def test_a_mask_of_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask

    made = create_block_mask(lambda b, h, q, k: (k <= q + 7) & (k > q + 3), None, None, 3, 10, device="cpu")
    assert window_of(made, 7, 3, None) == window_of(shown_by(made, 7, 3), 7, 3, None) == 4


def test_chunks_are_no_window():
    query, key = torch.arange(7, 10)[:, None], torch.arange(10)
    for size in (3, 4, 8):
        with pytest.raises(UnknownMask, match=r"gets a mask that (hides|shows) the token"):
            window_of(((key <= query) & (key // size == query // size))[None, None], 7, 3, None)


def test_a_chunk_shows_where_it_begins_among_the_queries():
    query, key = torch.arange(7, 10)[:, None], torch.arange(10)
    for size in (2, 3, 4, 8, 9):
        assert chunk_of(((key <= query) & (key // size == query // size))[None, None], 7, 3) == size
    begins_before = ((key <= query) & (key // 7 == query // 7))[None, None]
    for mask in (begins_before, mask_of(), mask_of(1), mask_of(3), None, torch.ones(1, 10)):
        assert chunk_of(mask, 7, 3) is None


def test_a_hole_is_no_window():
    mask = mask_of()
    mask[..., 5] = False
    with pytest.raises(UnknownMask, match="gets a mask that hides the token 4 before a query"):
        window_of(mask, 7, 3, None)


def test_a_bias():
    added = torch.zeros(1, 2, 3, 10).masked_fill(~mask_of(), -torch.inf)
    added[0, 1, 2, 4] = -0.5
    with pytest.raises(UnknownMask, match="adds to the scores"):
        window_of(added, 7, 3, None)


def test_another_shape():
    with pytest.raises(UnknownMask, match=r"of a kind that is not known, \(1, 1, 3, 3\)"):
        window_of(torch.ones(1, 1, 3, 3), 7, 3, None)
