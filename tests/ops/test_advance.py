"""``advance`` as torch sees it, and what it does, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.testing.forests import int_tensors, make_snapshot, random_parents
from tests.ops.test_library import changed
from tests.seeds import seeds

advance = torch.ops.prefixkit.advance


def arguments(seed: int) -> list[Any]:
    """A random forest, of which some leaves append and some rows pad; a leaf's last page has free slots, or is full."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, int(rng.integers(1, 12)))
    lengths = rng.integers(1, 12, len(parents))
    size = int(rng.choice([1, 4]))
    snapshot, _ = make_snapshot(rng, parents, lengths.tolist(), size)
    leaves = np.flatnonzero(snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1)
    leaf = np.concatenate((leaves[rng.random(len(leaves)) < 0.8], [-1] * int(rng.integers(0, 3)))).astype(np.int32)
    tree = int_tensors(snapshot.start, snapshot.length, snapshot.page_indptr, snapshot.pages, snapshot.first_slot)
    sampled = torch.from_numpy(rng.integers(-1, 100, len(leaf)))
    step = [torch.full((len(leaf),), -7) for _ in range(3)]
    return [torch.from_numpy(leaf), *tree, sampled, *step, int(rng.integers(0, len(leaf) + 1)), size]


def one_by_one(
    leaf: Tensor,
    start: Tensor,
    length: Tensor,
    page_indptr: Tensor,
    pages: Tensor,
    first_slot: Tensor,
    sampled: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: int,
    page_size: int,
) -> None:
    """The op's contract as one would read it out."""
    for row, node in enumerate(leaf[:rows].tolist()):
        if node < 0:
            tokens[row], positions[row], slots[row] = 0, 0, -1
            continue
        page, offset = divmod(int(first_slot[node] + length[node]), page_size)
        page += int(page_indptr[node])
        tokens[row] = max(int(sampled[row]), 0)
        if page < int(page_indptr[node + 1]):
            slots[row], positions[row] = int(pages[page]) * page_size + offset, start[node] + length[node]
            length[node] += 1
        else:
            slots[row], positions[row] = -1, start[node] + length[node] - 1


def copied(args: list[Any]) -> list[Any]:
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


@seeds(40)
def test_every_row_moves_one_position_further(seed: int) -> None:
    args = arguments(seed)
    expected = copied(args)
    for _ in range(6):  # until leaves are full
        advance(*args), one_by_one(*expected)
        assert all(map(torch.equal, args[:10], expected[:10]))


@pytest.mark.parametrize("seed", range(4))
def test_opcheck(seed: int) -> None:
    torch.library.opcheck(advance.default, arguments(seed))


def test_it_compiles_into_one_graph() -> None:
    args = arguments(3)
    expected = copied(args)
    torch.compiler.reset()
    torch.compile(advance, fullgraph=True, backend="aot_eager")(*args)
    advance(*expected)
    assert all(map(torch.equal, args[:10], expected[:10]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (changed(0, lambda leaf: leaf.long()), BadDtype, "leaf must be torch.int32"),
        (changed(0, lambda leaf: leaf[:1]), BadShape, r"leaf must have shape \[at least 3\]"),
        (changed(2, lambda length: length.long()), BadDtype, "nodes.length must be torch.int32"),
        (changed(2, lambda length: length[1:]), BadShape, "nodes.length must have shape"),
        (changed(3, lambda indptr: indptr[1:]), BadShape, "nodes.page_indptr must have shape"),
        (changed(6, lambda sampled: sampled.int()), BadDtype, "sampled must be torch.int64"),
        (changed(6, lambda sampled: sampled[None]), BadShape, r"sampled must have shape \[N\]"),
        (changed(7, lambda tokens: tokens[:1]), BadShape, r"tokens must have shape \[at least 3\]"),
        (changed(8, lambda positions: positions.to("meta")), BadDevice, "positions is on meta"),
        (changed(9, lambda slots: slots[:2]), BadShape, r"slots must have shape \[at least 3\]"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    change: Callable[..., tuple[Any, ...]], error: type[Exception], message: str
) -> None:
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1, 0, 0, 0], [3, 1, 1, 1], 4, orderly=True)
    tree = int_tensors(snapshot.start, snapshot.length, snapshot.page_indptr, snapshot.pages, snapshot.first_slot)
    step = [torch.full((3,), -7) for _ in range(4)]
    args = [torch.tensor([1, 2, 3], dtype=torch.int32), *tree, *step, 3, 4]
    before = copied(args)
    with pytest.raises(error, match=f"^advance: {message}"):
        advance(*change(*args))
    assert all(map(torch.equal, args[:10], before[:10]))
