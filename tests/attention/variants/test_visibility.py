"""What the terms of masks bound: causality, windows, chunks; and which functions only add to scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixkit.attention.variants.evaluate import evaluate
from prefixkit.attention.variants.tracing.trace import MASK_MOD, SCORE_MOD, trace
from prefixkit.attention.variants.visibility import MaskBounds, by_distance, mask_bounds, without_causality

CAUSAL, NOTHING = MaskBounds(causal=True), MaskBounds()
CASES: list[tuple[Any, MaskBounds]] = [
    (lambda b, h, q, kv: q >= kv, CAUSAL),
    (lambda b, h, q, kv: kv <= q, CAUSAL),
    (lambda b, h, q, kv: kv < q, CAUSAL),
    (lambda b, h, q, kv: kv - q < 1, CAUSAL),
    (lambda b, h, q, kv: q - kv > -1, CAUSAL),
    (lambda b, h, q, kv: -kv >= -q, CAUSAL),
    (lambda b, h, q, kv: kv <= q + 1, NOTHING),
    (lambda b, h, q, kv: q + 3 >= kv, NOTHING),
    (lambda b, h, q, kv: (q >= kv) | (kv < 3), NOTHING),
    (lambda b, h, q, kv: ~(q < kv), NOTHING),  # it is causal, but that is not seen: nothing is lost but time
    (lambda b, h, q, kv: (q >= kv) & (kv % 3 != h), CAUSAL),
    (lambda b, h, q, kv: q - kv < 5, MaskBounds(window=5)),
    (lambda b, h, q, kv: kv > q - 5, MaskBounds(window=5)),
    (lambda b, h, q, kv: (q - kv <= 5) & (q - kv >= 0), MaskBounds(True, 6)),
    (lambda b, h, q, kv: (q - kv).abs() < 5, MaskBounds(window=5)),
    (lambda b, h, q, kv: q == kv, MaskBounds(True, 1)),
    (lambda b, h, q, kv: q // 4 == kv // 4, MaskBounds(chunk=4)),
    (lambda b, h, q, kv: q // 4 == kv // 5, NOTHING),
    (lambda b, h, q, kv: (q // 4 == kv // 4) & (q - kv < 3) & (kv <= q), MaskBounds(True, 3, 4)),
    (lambda b, h, q, kv: q.float() - kv < 5, NOTHING),
    (lambda b, h, q, kv: 2 * q >= kv, NOTHING),
]


@pytest.mark.parametrize(("mask", "bounds"), CASES)
def test_terms_that_compare_positions_bound_what_is_visible(mask: Any, bounds: MaskBounds) -> None:
    assert mask_bounds(trace(mask, MASK_MOD)) == bounds


@pytest.mark.parametrize(("mask", "bounds"), CASES)
def test_bounds_and_what_is_left_of_a_mask_say_what_the_mask_says(mask: Any, bounds: MaskBounds) -> None:
    expression = trace(mask, MASK_MOD)
    q, kv, none = torch.arange(30)[:, None], torch.arange(30), torch.zeros((), dtype=torch.int64)
    shown = evaluate(expression, b=none, h=none, q_idx=q, kv_idx=kv)
    if bounds.causal:
        assert not bool((shown & (kv > q)).any())
    if bounds.window is not None:
        assert not bool((shown & (kv <= q - bounds.window)).any())
    if bounds.chunk is not None:
        assert not bool((shown & (kv // bounds.chunk != q // bounds.chunk)).any())
    rest = without_causality(expression)
    left = torch.ones(()).bool() if rest is None else evaluate(rest, b=none, h=none, q_idx=q, kv_idx=kv)
    assert torch.equal((left & (kv <= q)).expand(30, 30), (shown & (kv <= q)).expand(30, 30))
    if rest is not expression:
        assert bounds.causal


BIASES: list[tuple[Any, Any]] = [
    (lambda s, b, h, q, kv: s + (q - kv) * 0.5, lambda q, kv: (q - kv) * 0.5),
    (lambda s, b, h, q, kv: s - q, lambda q, kv: -1.0 * q),
    (lambda s, b, h, q, kv: (kv / 2 + (s - q.float())) + 1 - kv, lambda q, kv: kv / 2 - q + 1 - kv),
    (lambda s, b, h, q, kv: s, lambda q, kv: torch.zeros(())),
    (lambda s, b, h, q, kv: s * 1.0, None),
    (lambda s, b, h, q, kv: kv - s, None),
    (lambda s, b, h, q, kv: s + s, None),
    (lambda s, b, h, q, kv: torch.where(kv < 3, s, s - 1), None),
    (lambda s, b, h, q, kv: torch.tanh(s) + kv, None),
    (lambda s, b, h, q, kv: kv.float(), None),
]


@pytest.mark.parametrize(("score_mod", "bias"), BIASES)
def test_a_bias_is_what_is_added_to_scores_and_does_not_depend_on_them(score_mod: Any, bias: Any) -> None:
    found = trace(score_mod, SCORE_MOD).bias
    assert (found is None) == (bias is None)
    if found is not None:
        q, kv = torch.arange(30)[:, None], torch.arange(30)
        assert not found.reads("score")
        got = evaluate(found, q_idx=q, kv_idx=kv).expand(30, 30)
        torch.testing.assert_close(got, bias(q, kv).float().expand(30, 30))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda b, h, q, kv: kv <= q, True),
        (lambda b, h, q, kv: (q - kv) ** 2 + h < 7, True),
        (lambda b, h, q, kv: (kv + 3 - q).abs() // 2 == h, True),
        (lambda b, h, q, kv: q - (kv - 1) != 4, True),
        (lambda b, h, q, kv: h == b, True),
        (lambda b, h, q, kv: q + kv < 9, False),
        (lambda b, h, q, kv: q // 2 == kv // 2, False),
        (lambda b, h, q, kv: (q - kv < 3) | (kv < 4), False),
        (lambda b, h, q, kv: 2 * q - kv > q, False),
    ],
)
def test_what_depends_on_distances_alone_is_known(mask: Any, expected: bool) -> None:
    """``2 * q`` is a product, which is not looked into: what is not known counts as dependent on positions."""
    assert by_distance(trace(mask, MASK_MOD)) == expected
