"""Rows of a step as blocks of texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from prefixkit.attention.queries import StepTree
from prefixkit.models.indexing.indexers import (
    Block,
    IndexerCall,
    IndexKeys,
    blocks_of,
    in_texts,
    joined,
    selected_of,
)
from prefixkit.testing.forests import random_case
from tests.seeds import seeds

CPU = torch.device("cpu")


def random_tree(seed: int) -> StepTree:
    case = random_case(np.random.default_rng(seed))
    return StepTree(case.snapshot, case.queries)


def slots_of(tree: StepTree, node: int, end: int) -> list[int]:
    """Of the text of a node, up to its token ``end``."""
    above = int(tree.snapshot.parent[node])
    before = [] if above < 0 else slots_of(tree, above, int(tree.snapshot.length[above]))
    return [*before, *tree.snapshot.slots(np.array(node), np.arange(end)).tolist()]


@pytest.mark.parametrize("most_scores", [1, 60, 1000, 1 << 19])
@seeds(10)
def test_blocks_have_each_row_once_with_the_text_before_it(seed: int, most_scores: int) -> None:
    tree = random_tree(seed)
    blocks, node, offset = blocks_of(tree, CPU, most_scores), tree.queries.row_node(), tree.queries.row_offset()
    assert [block.first for block in blocks] == [0, *(block.last for block in blocks[:-1])]
    assert blocks[-1].last == tree.queries.num_rows
    for block in blocks:
        texts, most = block.rows.shape
        assert torch.equal(block.rows.flatten()[block.real], torch.arange(block.first, block.last))
        assert block.visible.shape == (texts, most, block.slots.shape[1])
        assert most == 1 or texts * most * block.slots.shape[1] <= most_scores or texts == 1
        for place in block.real.tolist():
            text, row = place // most, int(block.rows.flatten()[place])
            seen = block.slots[text][block.visible.flatten(0, 1)[place]].tolist()
            assert seen == slots_of(tree, int(node[row]), int(offset[row]) + 1)
            assert block.places[text][block.visible.flatten(0, 1)[place]].tolist() == [*range(len(seen))]
            assert place % most - most == len(seen) - int((block.places[text] >= 0).sum()) - 1, "rows end a text"


@pytest.mark.parametrize("seed", range(5))
def test_small_blocks_hold_no_more_scores_than_they_may(seed: int) -> None:
    tree = random_tree(seed)
    for block in blocks_of(tree, CPU, 300):
        rows, most = block.rows.numel(), block.rows.shape[1]
        assert rows * block.slots.shape[1] <= 300 or (block.rows.shape[0] == 1 and most == 1)


class Best(nn.Module):
    """Selects the two visible keys that are nearest to a row's number."""

    def forward(self, x, pair, mask, past_key_values=None):  # type: ignore[no-untyped-def]
        assert torch.equal(pair[0], 2 * pair[1])
        keys = past_key_values.update_indexer(x, 0)
        assert past_key_values.layers[7].keys.shape[2] == past_key_values.layers[0].get_seq_length() == keys.shape[1]
        nearness = -(x - keys.transpose(1, 2)).abs().masked_fill(~mask, torch.inf)
        return nearness.topk(2).indices


class Shows(Best):
    """Returns the same as a mask, bool or added."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x, pair, mask, past_key_values=None):  # type: ignore[no-untyped-def]
        indices = super().forward(x, pair, mask, past_key_values)
        shown = torch.zeros_like(mask).scatter(2, indices, True)[:, None]
        return shown if self.dtype == torch.bool else torch.zeros(shown.shape).masked_fill(~shown, torch.finfo().min)


def two_texts() -> Block:
    """Of two tokens and of three, of which the first is padded."""
    visible = torch.tensor([[[0, 1, 0], [0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
    rows, real = torch.tensor([[0, 0, 1], [2, 3, 4]]), torch.tensor([1, 2, 3, 4, 5])
    return Block(0, 5, rows, real, torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 0]), visible)


@pytest.mark.parametrize("indexer", [Best(), Shows(torch.bool), Shows(torch.float32)], ids=["indices", "bool", "added"])
def test_an_indexer_gets_each_text_with_its_keys_and_its_mask(indexer: Best) -> None:
    """Each row of a text is nearest to itself; what is selected comes back by positions in texts."""
    block, x, taken = two_texts(), torch.arange(5.0)[None, :, None] * 3, []

    def exchange(keys: torch.Tensor) -> torch.Tensor:
        taken.append(keys)
        return keys

    given = (x, (2 * x[0][None], x), torch.empty(1, 0, 0, dtype=torch.bool))
    call = IndexerCall(indexer, given, {"past_key_values": "cache"}, "cache", 5, 0)
    found = call.run(IndexKeys(exchange, block), block, lambda mask: not mask.numel())
    assert torch.equal(taken[0][..., 0], torch.tensor([[0.0, 0, 3], [6, 9, 12]]))
    selected = joined([in_texts(block, found)])
    assert selected.shape[:2] == (1, 5)
    shown = selected[0] if selected.dtype == torch.bool else selected_of(selected, 3)
    seen = torch.arange(3) <= torch.tensor([0, 1, 0, 1, 2])[:, None]
    assert (shown & seen).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_what_stands_for_positions_of_texts_and_of_rows_comes_as_those_of_a_block() -> None:
    """Positions 0, 1, 2, then those of five rows."""
    block, taken = two_texts(), []

    class Positions(nn.Module):
        def forward(self, positions, past_key_values):  # type: ignore[no-untyped-def]
            taken.append(positions)
            return torch.zeros(2, 3, 1, dtype=torch.int32)

    positions = torch.tensor([0, 1, 2, 10, 11, 12, 13, 14])[None, :, None]
    call = IndexerCall(Positions(), (positions, "cache"), {}, "cache", 5, 3)
    call.run(IndexKeys(lambda keys: keys, block), block, lambda mask: False)
    assert taken[0][..., 0].tolist() == [[0, 0, 1, 10, 10, 11], [0, 1, 2, 12, 13, 14]]


def test_blocks_of_few_tokens_join_those_of_many() -> None:
    indices = joined([torch.tensor([[0]]), torch.tensor([[0, 2], [-5, 1]])])
    assert indices.tolist() == [[[0, -1], [0, 2], [-1, 1]]]
    assert selected_of(indices, 4).int().tolist() == [[1, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]]
    masks = joined([torch.tensor([[True]]), torch.tensor([[True, False], [False, True]])])
    assert masks.int().tolist() == [[[1, 0], [1, 0], [0, 1]]]


def one_text() -> Block:
    at = torch.arange(2)
    return Block(0, 2, at[None], at, at[None], at.new_zeros(1), torch.ones(1, 2, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(1, 2, 2), "something else than indices of tokens"),
        (torch.ones(1, 2, 2, dtype=torch.bool), "something else than indices of tokens"),
        (None, "something else than indices of tokens, or a mask of them: NoneType"),
        (torch.zeros(1, 3, 2, dtype=torch.int32), r"indices of shape \(1, 3, 2\) for \(1, 2\) rows"),
        (torch.zeros(1, 2, 2, 2, dtype=torch.bool), r"a mask of them: \(1, 2, 2, 2\)"),
    ],
)
def test_what_an_indexer_returns_is_checked(returned: torch.Tensor | None, message: str) -> None:
    block, call = one_text(), IndexerCall(lambda: returned, (), {}, None, 2, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        call.run(IndexKeys(lambda keys: keys, block), block, bool)


def test_a_tensor_that_is_not_of_each_row_is_refused() -> None:
    block, call = one_text(), IndexerCall(Best(), (torch.zeros(3, 1, 2),), {}, None, 2, 0)
    with pytest.raises(ValueError, match=r"takes a tensor of shape \(3, 1, 2\), which is not one of each row"):
        call.run(IndexKeys(lambda keys: keys, block), block, lambda of: False)
