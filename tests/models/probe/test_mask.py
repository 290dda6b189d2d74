"""What a mask shows beside what its attention function is told of: masks of 10 tokens, the last 3 of them queries."""

from __future__ import annotations

import pytest
import torch

from prefixkit.models.probe.mask import shown_wrongly


def mask_of(window=None):
    query, key = torch.arange(7, 10)[:, None], torch.arange(10)
    shown = key <= query
    return (shown if window is None else shown & (key > query - window))[None, None]


@pytest.mark.parametrize("window", [None, 1, 4, 20])
def test_a_mask_that_says_what_the_function_is_told(window):
    for dtype in (torch.float32, torch.bfloat16):
        mask = mask_of(window)
        assert shown_wrongly(mask, 7, 3, window) is None
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        assert shown_wrongly(added, 7, 3, window) is None


def test_a_window_that_the_function_is_not_told_of():
    assert "hides the token 4 before a query" in shown_wrongly(mask_of(4), 7, 3, None)


def test_a_window_that_the_mask_does_not_have():
    assert "shows the token 4 before a query" in shown_wrongly(mask_of(), 7, 3, 4)


def test_a_bias():
    added = torch.zeros(1, 2, 3, 10).masked_fill(~mask_of(), -torch.inf)
    assert shown_wrongly(added, 7, 3, None) is None
    added[0, 1, 2, 4] = -0.5
    assert "adds to the scores" in shown_wrongly(added, 7, 3, None)


def test_a_mask_of_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask

    made = create_block_mask(lambda b, h, q, k: k <= q + 7, None, None, 3, 10, device="cpu")
    assert shown_wrongly(made, 7, 3, None) is None
    assert "shows the token 4" in shown_wrongly(made, 7, 3, 4)


def test_none_is_left_to_the_attention_function():
    assert shown_wrongly(None, 7, 3, 4) is None
    assert shown_wrongly(torch.ones(1, 10), 7, 3, 4) is None


def test_another_shape():
    assert "of a kind that is not known, (1, 1, 3, 3)" in shown_wrongly(torch.ones(1, 1, 3, 3), 7, 3, None)
