"""Rows of a step as blocks of texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from prefixkit.attention.queries import StepTree
from prefixkit.models.indexing.indexers import Block, IndexKeys, blocks_of, joined, run_indexer, selected_of
from prefixkit.testing.forests import random_case

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
@pytest.mark.parametrize("seed", range(10))
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
        nearness = -(x - keys.transpose(1, 2)).abs().masked_fill(~mask, torch.inf)
        return nearness.topk(2).indices


def test_an_indexer_gets_each_text_with_its_keys_and_its_mask() -> None:
    """Two texts of two tokens and three, of which the first is padded; each row of a text is nearest to itself."""
    rows = torch.tensor([[0, 1, 1], [2, 3, 4]])
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 1, 0]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
    block = Block(0, 5, rows, torch.tensor([0, 1, 3, 4, 5]), torch.zeros(2, 3, dtype=torch.int64), visible)
    x = torch.arange(5.0)[None, :, None] * 3
    taken = []

    def exchange(keys: torch.Tensor) -> torch.Tensor:
        taken.append(keys)
        return keys

    given = (x, (2 * x[0][None], x), torch.empty(1, 0, 0, dtype=torch.bool))
    found = run_indexer(
        Best(), given, {"past_key_values": "cache"}, "cache", IndexKeys(exchange), block, lambda mask: not mask.numel()
    )
    assert torch.equal(taken[0][..., 0], torch.tensor([[0.0, 3, 3], [6, 9, 12]]))
    indices = joined([(block, found)])
    assert indices.shape == (1, 5, 2)
    assert indices[0, :, 0].tolist() == [0, 1, 0, 1, 2]
    assert indices[0, 1].tolist() == [1, 0] and indices[0, 4].tolist() == [2, 1]


def test_blocks_of_few_tokens_join_those_of_many() -> None:
    def block(rows: int) -> Block:
        at = torch.arange(rows)
        return Block(0, rows, at[None], at, at[None], torch.ones(1, rows, rows, dtype=torch.bool))

    parts = [(block(1), torch.tensor([[[0]]])), (block(2), torch.tensor([[[0, 2], [3, 1]]]))]
    indices = joined(parts)
    assert indices.tolist() == [[[0, -1], [0, 2], [3, 1]]]
    assert selected_of(indices, 4).int().tolist() == [[1, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(1, 2, 2), "something else than indices of tokens"),
        (torch.ones(1, 2, 2, dtype=torch.bool), "something else than indices of tokens"),
        (None, "something else than indices of tokens, NoneType"),
        (
            torch.zeros(1, 3, 2, dtype=torch.int32),
            r"indices of shape \(1, 3, 2\) for \(1, 2\) rows",
        ),
        (torch.zeros(1, 2, 3, dtype=torch.int32), r"at most 2 tokens"),
    ],
)
def test_what_an_indexer_returns_is_checked(returned: torch.Tensor | None, message: str) -> None:
    at = torch.arange(2)
    block = Block(0, 2, at[None], at, at[None], torch.ones(1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=message):
        run_indexer(lambda: returned, (), {}, None, IndexKeys(lambda keys: keys), block, bool)  # type: ignore[arg-type]


def test_a_tensor_that_is_not_of_each_row_is_refused() -> None:
    at = torch.arange(2)
    block = Block(0, 2, at[None], at, at[None], torch.ones(1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"takes a tensor of shape \(3, 1, 2\), which is not one of each row"):
        run_indexer(Best(), (torch.zeros(3, 1, 2),), {}, None, IndexKeys(lambda keys: keys), block, lambda of: False)
