"""Indexers of sparse attention on a tree: which tokens each row of a step selects.

The attention module of such a model has an indexer: it gives its keys to the cache's ``update_indexer``, scores every
key that comes back for each row, and returns the indices of the best.  Rows of a step are of many texts, so the
module's own indexer runs on blocks of rows, each a padded batch of the texts that its rows belong to: their index keys
are gathered from the pool, and a mask shows each row its own token and those before it.  Indices are then positions in
a row's text.  Where scores tie, ``torch.topk`` takes any: which, depends on the length of the batch, with and without a
tree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prefixkit.attention.queries import StepTree
from prefixkit.tree.arrays import Longs

# Rows times texts' tokens of a block: each head's scores of them are in memory at once, and a mask.  With 64 heads they
# take 128 MiB on a CPU; on a GPU 512 MiB, for the host launches each block.
_MOST_SCORES = {"cpu": 1 << 19, "cuda": 1 << 21}
# Rows times tokens of a block are at most this multiple of those without padding.
_MOST_PADDING = 2


@functools.cache
def is_indexer(cls: type[nn.Module]) -> bool:
    """Whether the code of a class's ``forward`` gives index keys to a cache."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and "update_indexer" in code.co_names


@dataclass(frozen=True, eq=False)
class Block:
    """Rows that an indexer takes at once, as a batch that is padded on the right.

    Attributes:
        first, last: The rows are those from ``first`` to before ``last``.
        rows: ``[texts, S]`` int64; each text's last row repeats as padding.
        real: ``[last - first]`` int64 where the rows are in a flat ``[texts * S]``.
        slots: ``[texts, T]`` int64 of each text's tokens, by position; its last repeats as padding.
        visible: ``[texts, S, T]`` bool: a row sees itself and what is before it.
    """

    first: int
    last: int
    rows: Tensor
    real: Tensor
    slots: Tensor
    visible: Tensor


class IndexKeys:
    """In place of a cache for an indexer: ``exchange`` takes its keys ``[texts, S, dim]`` and returns all keys of the
    texts, ``[texts, T, dim]``.
    """

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        self._exchange = exchange

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """What transformers' caches have by this name."""
        return self._exchange(indexer_key_states)


def run_indexer(
    indexer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cache: object,
    keys: IndexKeys,
    block: Block,
    is_mask: Callable[[Tensor], bool],
) -> Tensor:
    """``[texts, S, k]`` indices that an indexer returns for a block.

    Args:
        indexer: The indexer.
        args, kwargs: What it was called with for all rows.
        cache: What stands for the cache among these.
        keys: In its place.
        block: The block.
        is_mask: Whether a tensor is the mask, for which the block's takes its place.

    Raises:
        ValueError: it is called with what is of no row, or does not return indices of tokens.
    """

    def of_block(value: Any) -> Any:
        if value is cache:
            return keys
        if isinstance(value, tuple | list):
            return tuple(map(of_block, value))
        if not isinstance(value, Tensor):
            return value
        if is_mask(value):
            return block.visible if value.ndim == 3 else block.visible[:, None]
        if value.ndim < 2 or value.shape[0] != 1 or value.shape[1] < block.last:
            raise ValueError(f"an indexer takes a tensor of shape {tuple(value.shape)}, which is not one of each row")
        return value[0][block.rows]

    found = indexer(*map(of_block, args), **{name: of_block(value) for name, value in kwargs.items()})
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if not isinstance(found, Tensor) or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(f"an indexer returns something else than indices of tokens, {shape}")
    if found.ndim != 3 or found.shape[:2] != block.rows.shape or found.shape[2] > block.slots.shape[1]:
        expected = f"{tuple(block.rows.shape)} rows and at most {block.slots.shape[1]} tokens"
        raise ValueError(f"an indexer returns indices of shape {shape} for {expected}")
    return found


def joined(parts: list[tuple[Block, Tensor]]) -> Tensor:
    """``[1, rows, k]`` int32 indices of all blocks; -1 where one has fewer."""
    most = max(found.shape[2] for _, found in parts)
    rows = [nn.functional.pad(found, (0, most - found.shape[2]), value=-1) for _, found in parts]
    return torch.cat([found.flatten(0, 1)[block.real] for (block, _), found in zip(parts, rows, strict=True)])[None]


def selected_of(indices: Tensor, length: int) -> Tensor:
    """``[rows, length]`` bool: the positions at ``indices [1, rows, k]``, of which -1 stands for none."""
    at = torch.where(indices[0] < 0, length, indices[0]).long()
    shown = torch.zeros(at.shape[0], length + 1, dtype=torch.bool, device=at.device)
    return shown.scatter_(1, at, True)[:, :length]


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows ``first`` to before ``last`` of one node, and the slots of its text up to the last of them."""

    first: int
    last: int
    slots: Longs


def blocks_of(tree: StepTree, device: torch.device, most_scores: int | None = None) -> list[Block]:
    """The rows of a step as blocks, in order: rows of ancestors come before those below them, or with them.

    ``most_scores``: rows times tokens of a block at most, but for a single row; None: what suits the device.
    """
    most_scores = _MOST_SCORES[device.type] if most_scores is None else most_scores
    blocks, pieces, scores = list[Block](), list[_Piece](), 0
    for piece in _pieces(tree, most_scores):
        rows, tokens = piece.last - piece.first, len(piece.slots)
        most = max([rows, *(other.last - other.first for other in pieces)])
        longest = max([tokens, *(len(other.slots) for other in pieces)])
        padded = (len(pieces) + 1) * most * longest
        if pieces and padded > min(most_scores, _MOST_PADDING * (scores + rows * tokens)):
            blocks.append(_block(pieces, tree, device))
            pieces, scores = [], 0
        pieces.append(piece)
        scores += rows * tokens
    return [*blocks, _block(pieces, tree, device)]


def _pieces(tree: StepTree, most_scores: int) -> Iterator[_Piece]:
    """Query runs, split where they have too many scores."""
    paths, first, queries = dict[int, Longs](), 0, tree.queries
    for node, begin, end in zip(queries.node.tolist(), queries.begin.tolist(), queries.end.tolist(), strict=True):
        path = _path(tree, node, paths)
        above, at = int(tree.snapshot.start[node]), begin
        while at < end:
            stop = min(end, at + max(1, most_scores // (above + end)))
            yield _Piece(first, first + stop - at, path[: above + stop])
            first, at = first + stop - at, stop


def _path(tree: StepTree, node: int, paths: dict[int, Longs]) -> Longs:
    """The slots of a node's text, from its first token to the node's last; ``paths`` has those of nodes before."""
    chain = list[int]()
    while node >= 0 and node not in paths:
        chain.append(node)
        node = int(tree.snapshot.parent[node])
    path = paths[node] if node >= 0 else np.empty(0, np.int64)
    for each in reversed(chain):
        path = np.concatenate((path, tree.snapshot.slots(np.array(each), np.arange(tree.length[each]))))
        paths[each] = path
    return path


def _block(pieces: list[_Piece], tree: StepTree, device: torch.device) -> Block:
    rows = np.array([piece.last - piece.first for piece in pieces])
    firsts, tokens = np.array([piece.first for piece in pieces]), np.array([len(piece.slots) for piece in pieces])
    grid = firsts[:, None] + np.minimum(np.arange(rows.max()), rows[:, None] - 1)
    real = np.flatnonzero(np.arange(rows.max()) < rows[:, None])
    slots = np.stack([np.pad(piece.slots, (0, tokens.max() - len(piece.slots)), "edge") for piece in pieces])
    arrays = grid.astype(np.int64), real, slots, tree.positions[grid]
    at, flat, of, positions = (torch.from_numpy(array).to(device) for array in arrays)
    visible = torch.arange(int(tokens.max()), device=device) <= positions[..., None]
    return Block(pieces[0].first, pieces[-1].last, at, flat, of, visible)
