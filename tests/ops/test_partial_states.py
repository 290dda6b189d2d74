"""States of some queries each, merged into those of all."""

from __future__ import annotations

import torch

from prefixkit.ops.partial_states import State, merge_rows


def state(score: torch.Tensor, v: torch.Tensor) -> State:
    """Attention by scores ``[rows, heads, keys]`` of values ``[heads, keys, dim]``."""
    return State(torch.einsum("qhk,hkd->qhd", score.softmax(2), v), score.logsumexp(2))


def test_parts_of_some_rows_are_the_whole():
    torch.manual_seed(0)
    score, v = torch.randn(5, 2, 9).mul_(3), torch.randn(2, 9, 4)
    want = state(score, v)
    first, last = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 3, 4])
    parts = [(state(score[first][..., :6], v[:, :6]), first), (state(score[last][..., 6:], v[:, 6:]), last)]
    found = merge_rows(parts, 5)
    for row, keys in ((0, slice(0, 6)), (1, slice(None)), (2, slice(6, None)), (3, slice(6, None)), (4, slice(None))):
        alone = state(score[row : row + 1][..., keys], v[:, keys])
        torch.testing.assert_close(found.out[row], alone.out[0])
        torch.testing.assert_close(found.lse[row], alone.lse[0])
    whole = merge_rows([(want, None)], 5)
    assert whole.out is want.out, "one part of all rows needs no merge"


def test_rows_of_no_part_are_empty():
    one = State(torch.ones(1, 2, 4), torch.zeros(1, 2))
    out, lse = merge_rows([(one, torch.tensor([1])), (one, torch.tensor([1]))], 3)
    assert torch.equal(out[1], torch.ones(2, 4))
    assert torch.equal(out[[0, 2]], torch.zeros(2, 2, 4))
    assert bool((lse[[0, 2]] == -torch.inf).all())
