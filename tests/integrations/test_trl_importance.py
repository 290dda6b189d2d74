"""Importance ratios of what was sampled: bounded as TRL bounds them."""

from __future__ import annotations

import pytest
import torch

from prefixkit.integrations.trl_importance import importance_ratio


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[0.5, 2.0, 1.0]]),
        ("token_mask", [[0.0, 0.0, 1.0]]),
        ("sequence_truncate", [[0.75]]),
        ("sequence_mask", [[0.75]]),
    ],
)
def test_ratios_beyond_the_bounds_are_cut_or_masked(mode, expected):
    ratio = importance_ratio(torch.tensor([[0.25, 3.0, 1.0]]).log(), mode, 0.5, 2.0)
    assert ratio.tolist() == [pytest.approx(row) for row in expected]


def test_a_mode_that_trl_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"must be 'token_truncate', .* got 'token'"):
        importance_ratio(torch.zeros(1, 2), "token", None, 3.0)
