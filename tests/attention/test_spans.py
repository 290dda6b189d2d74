"""Spans of texts: what sees one another, directly or through others."""

from __future__ import annotations

import os

import numpy as np
import torch

from prefixkit.attention.spans import LooksAhead, Spans
from prefixkit.attention.variants import variant


def looks_ahead(mask, heads=3):
    return LooksAhead(variant(mask_mod=mask), heads, torch.device("cpu"))


def spans_of(*masks, length):
    return Spans([looks_ahead(mask) for mask in masks])(length).tolist()


def prefix(length):
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < length)


def test_a_prefix_is_a_span_as_far_as_there_is_text():
    assert spans_of(prefix(4), length=7) == [[0, 4]]
    assert spans_of(prefix(4), length=3) == [[0, 3]]
    assert spans_of(prefix(4), length=1) == spans_of(prefix(4), length=0) == spans_of(prefix(1), length=9) == []


def test_ranges_that_share_a_token_are_one_span_and_neighbours_are_two():
    def ahead(*pairs):
        seen = torch.zeros(12, dtype=torch.long)
        for q, kv in pairs:
            seen[q] = kv
        return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx == seen[q_idx])

    assert spans_of(ahead((0, 3), (3, 5)), length=12) == [[0, 6]]
    assert spans_of(ahead((0, 3), (2, 7), (5, 6)), length=12) == [[0, 8]]
    assert spans_of(ahead((0, 3), (4, 5)), length=12) == [[0, 4], [4, 6]]
    assert spans_of(ahead((0, 3)), ahead((2, 6)), length=12) == [[0, 7]], "of several layers"


def test_a_single_head_that_looks_ahead_is_enough():
    def of_last_head(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) | ((h == 2) & (kv_idx < 3))

    assert spans_of(of_last_head, length=5) == [[0, 3]]


def test_long_texts_are_looked_at_block_by_block():
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = np.random.default_rng(seed)
    images = torch.zeros(2600, dtype=torch.long)
    bounds = sorted(rng.choice(2600, 8, replace=False).tolist())
    for number, (begin, end) in enumerate(zip(bounds[::2], bounds[1::2], strict=True), 1):
        images[begin:end] = number

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) | ((images[q_idx] == images[kv_idx]) & (images[q_idx] > 0))

    want = [[begin, end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if end - begin > 1]
    assert spans_of(mask, length=2600) == want


def test_shorter_and_longer_texts_are_what_they_would_be_alone():
    """In any order: of masks with gaps too."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = np.random.default_rng(seed)
    seen = torch.from_numpy(rng.random((60, 60)) < 0.02)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) | seen[q_idx, kv_idx]

    spans = Spans([looks_ahead(mask), looks_ahead(prefix(7))])
    for length in rng.permutation(np.arange(2, 61)).tolist():
        reach = [max([q, *(kv for kv in range(q + 1, length) if seen[q, kv] or kv < 7)]) for q in range(length)]
        assert spans(length).tolist() == closed(reach)


def closed(reach):
    """The spans of what each token sees last, one after another."""
    found, begin, last = [], 0, -1
    for q, furthest in enumerate(reach):
        last = max(last, furthest)
        if last == q:
            found += [[begin, q + 1]] * (q > begin)
            begin = q + 1
    return found


def test_what_was_found_is_forgotten_once_the_mask_has_changed():
    end = torch.tensor(4)
    spans = Spans([looks_ahead(lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < end))])
    assert spans(7).tolist() == [[0, 4]]
    end.fill_(6)
    spans.clear()
    assert spans(7).tolist() == [[0, 6]]
