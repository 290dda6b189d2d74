"""Indexers of sparse attention on a tree: which tokens each row of a step selects.

The attention module of such a model has an indexer: it passes its keys to the cache's ``update_indexer``, scores all
returned keys, or groups of them, for each row, and returns the indices of the best or a mask that shows them.
Rows of a step belong to many texts, so the module's own indexer runs on blocks of rows.  A block is a batch, padded on
the left, of the texts that its rows belong to: the index keys of these texts are gathered from the pool, with zeros for
padding, and a mask shows each row its own token and earlier ones.  The returned indices are converted to positions in
a row's text.  Among equal scores ``torch.topk`` selects any: which depends on the batch's length, with and without a
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

# The most rows times tokens of texts in a block: the scores of all heads, and a mask, are in memory at once.  With 64
# heads they take 128 MiB on a CPU, and 512 MiB on a GPU, because the host launches each block.
_MOST_SCORES = {"cpu": 1 << 19, "cuda": 1 << 21}
# Rows times tokens of a block are at most this multiple of the same number without padding.
_MOST_PADDING = 2


@functools.cache
def is_indexer(cls: type[nn.Module]) -> bool:
    """Whether the code of a class's ``forward`` stores index keys in a cache."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and "update_indexer" in code.co_names


@dataclass(frozen=True, eq=False)
class Block:
    """Rows that an indexer processes at once, the last rows of each text, as a batch that is padded on the left.

    Attributes:
        first, last: The rows are those from ``first`` to before ``last``.
        rows: ``[texts, S]`` int64; each text's first row repeats as padding.
        real: ``[last - first]`` int64 indices of the rows in a flat ``[texts * S]``.
        slots: ``[texts, T]`` int64 the slots of each text's tokens; padding repeats the slot of the first token.
        padding: ``[texts]`` int64 the number of padding tokens among a text's ``T``.
        visible: ``[texts, S, T]`` bool: a row sees its own token and earlier ones.
    """

    first: int
    last: int
    rows: Tensor
    real: Tensor
    slots: Tensor
    padding: Tensor
    visible: Tensor

    @property
    def places(self) -> Tensor:
        """``[texts, T]`` int64 the position of each token in its text; below 0 for padding."""
        tokens = torch.arange(self.slots.shape[1], device=self.slots.device)
        return tokens - self.padding[:, None]


class _IndexLayer:
    """The layer of :class:`IndexKeys`, with what indexers read of it: the number of tokens of its texts."""

    def __init__(self, slots: Tensor) -> None:
        self.keys = slots[:, None, :, None]

    def get_seq_length(self) -> int:
        """Tokens of the texts, including the rows that run."""
        return self.keys.shape[2]


class AnyIndex(tuple[Any, ...]):
    """One layer, returned for any index."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


class IndexKeys:
    """The cache of an indexer that runs on a block: ``exchange`` stores its keys ``[texts, S, dim]`` and returns all
    keys of the texts, ``[texts, T, dim]``.
    """

    def __init__(self, exchange: Callable[[Tensor], Tensor], block: Block) -> None:
        self._exchange = exchange
        self.layers = AnyIndex((_IndexLayer(block.slots),))

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """The method of transformers' caches with this name."""
        return self._exchange(indexer_key_states)


@dataclass(frozen=True, eq=False)
class IndexerCall:
    """The call of an indexer by its attention module, for all rows.

    Attributes:
        indexer: The module.
        args, kwargs: The arguments of the call.
        cache: The object among the arguments that is passed as the cache.
        total: Rows.
        before: Number of positions 0, 1, 2, ... that precede the rows' own positions in tensors that hold both.
    """

    indexer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: object
    total: int
    before: int

    def run(self, keys: IndexKeys, block: Block, is_mask: Callable[[Tensor], bool]) -> Tensor:
        """The indexer's selection for a block: ``[texts, S, k]`` indices, below 0 for none, or a ``[texts, S, T]`` bool
        mask that shows the tokens; arguments and errors as :meth:`returned`.
        """
        return checked_selection(self.returned(keys, block, is_mask), block)

    def returned(self, keys: object, block: Block, is_mask: Callable[[Tensor], bool]) -> Any:
        """The indexer's output for a block.

        Args:
            keys: The object to pass as the cache.
            block: The block.
            is_mask: Whether a tensor is the mask, which the block's mask replaces.

        Raises:
            ValueError: an argument is a tensor without an entry per row.
        """

        def of_block(value: Any) -> Any:
            if value is self.cache:
                return keys
            if isinstance(value, tuple | list):
                return tuple(map(of_block, value))
            if not isinstance(value, Tensor):
                return value
            if is_mask(value):
                return _shown_as(value, block.visible if value.ndim == 3 else block.visible[:, None])
            if value.ndim < 2 or value.shape[0] != 1 or value.shape[1] < block.last:
                raise ValueError(
                    f"an indexer takes a tensor of shape {tuple(value.shape)}, which is not one of each row"
                )
            if self.before and value.shape[1] == self.before + self.total:
                places = block.places.clamp(0, self.before - 1)
                return torch.cat((value[0][places], value[0][self.before + block.rows]), 1)
            return value[0][block.rows]

        kwargs = {name: of_block(value) for name, value in self.kwargs.items()}
        return self.indexer(*map(of_block, self.args), **kwargs)


def _shown_as(mask: Tensor, visible: Tensor) -> Tensor:
    """``visible`` as a mask of the same kind as ``mask``: bool, or added to scores."""
    if mask.dtype == torch.bool:
        return visible
    hidden = torch.finfo(mask.dtype).min
    return torch.zeros(visible.shape, dtype=mask.dtype, device=visible.device).masked_fill_(~visible, hidden)


def is_selection_mask(found: Tensor) -> bool:
    """Whether a result of :meth:`IndexerCall.run` is a mask."""
    return found.dtype == torch.bool


def checked_selection(found: Any, block: Block) -> Tensor:
    """An indexer's output in the form of :meth:`IndexerCall.run`; ValueError if it is no selection of tokens."""
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    texts, rows, tokens = block.visible.shape
    if isinstance(found, Tensor) and found.shape == (texts, 1, rows, tokens):
        if found.is_floating_point():
            found = found > torch.finfo(found.dtype).min / 2
        if found.dtype == torch.bool:
            mask: Tensor = found[:, 0]
            return mask
    if not isinstance(found, Tensor) or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(f"an indexer returns something else than indices of tokens, or a mask of them: {shape}")
    if found.ndim != 3 or found.shape[:2] != (texts, rows):
        raise ValueError(f"an indexer returns indices of shape {shape} for {(texts, rows)} rows")
    return found


def in_texts(block: Block, found: Tensor) -> Tensor:
    """A result of :meth:`IndexerCall.run` for the rows of a block, converted to positions in their texts: indices
    ``[rows, k]``, below 0 for none, or a mask ``[rows, T]``.
    """
    if not is_selection_mask(found):
        return (found - block.padding[:, None, None]).flatten(0, 1)[block.real]
    tokens = block.slots.shape[1]
    at = (torch.arange(tokens, device=found.device) + block.padding[:, None]).clamp(max=tokens - 1)
    moved = (found & block.visible).gather(2, at[:, None].expand_as(found))
    return (moved & (block.places[:, None] < tokens - block.padding[:, None, None])).flatten(0, 1)[block.real]


def joined(parts: list[Tensor]) -> Tensor:
    """``[1, rows, k]`` int32 indices of all blocks, padded with -1; or their ``[1, rows, T]`` masks."""
    most = max(found.shape[1] for found in parts)
    fill = 0 if is_selection_mask(parts[0]) else -1
    found = torch.cat([nn.functional.pad(found, (0, most - found.shape[1]), value=fill) for found in parts])[None]
    return found if is_selection_mask(found) else found.clamp_(min=-1).to(torch.int32)


def selected_of(indices: Tensor, length: int) -> Tensor:
    """``[rows, length]`` bool, True at positions ``indices [1, rows, k]``; indices out of range are ignored."""
    at = torch.where((indices[0] < 0) | (indices[0] >= length), length, indices[0]).long()
    shown = torch.zeros(at.shape[0], length + 1, dtype=torch.bool, device=at.device)
    return shown.scatter_(1, at, True)[:, :length]


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows from ``first`` to before ``last`` of one node, and the slots of its text up to the last of these rows."""

    first: int
    last: int
    slots: Longs


def blocks_of(
    tree: StepTree, device: torch.device, most_scores: int | None = None, *, padded: bool = True
) -> list[Block]:
    """The rows of a step as blocks, in order: an ancestor's rows are in the block of its descendants' rows, or earlier.

    ``most_scores``: the most rows times tokens of a block of several rows; None: the number that suits the device.
    ``padded``: whether texts of a block may differ in length.
    """
    most_scores = _MOST_SCORES[device.type] if most_scores is None else most_scores
    blocks, pieces, scores = list[Block](), list[_Piece](), 0
    for piece in _pieces(tree, most_scores):
        rows, tokens = piece.last - piece.first, len(piece.slots)
        most = max([rows, *(other.last - other.first for other in pieces)])
        longest = max([tokens, *(len(other.slots) for other in pieces)])
        size = (len(pieces) + 1) * most * longest
        full = size > min(most_scores, _MOST_PADDING * (scores + rows * tokens))
        if pieces and (full or (not padded and tokens != len(pieces[0].slots))):
            blocks.append(_block(pieces, tree, device))
            pieces, scores = [], 0
        pieces.append(piece)
        scores += rows * tokens
    return [*blocks, _block(pieces, tree, device)]


def _pieces(tree: StepTree, most_scores: int) -> Iterator[_Piece]:
    """Query runs, split into pieces with at most ``most_scores`` scores or one row."""
    paths, first, queries = dict[int, Longs](), 0, tree.queries
    for node, begin, end in zip(queries.node.tolist(), queries.begin.tolist(), queries.end.tolist(), strict=True):
        path = _path(tree, node, paths)
        above, at = int(tree.snapshot.start[node]), begin
        while at < end:
            stop = min(end, at + max(1, most_scores // (above + end)))
            yield _Piece(first, first + stop - at, path[: above + stop])
            first, at = first + stop - at, stop


def _path(tree: StepTree, node: int, paths: dict[int, Longs]) -> Longs:
    """The slots of a node's text, from its first token to the node's last; ``paths`` caches those of earlier nodes."""
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
    lasts, tokens = np.array([piece.last for piece in pieces]), np.array([len(piece.slots) for piece in pieces])
    back = np.arange(rows.max())[::-1]
    grid = lasts[:, None] - 1 - np.minimum(back, rows[:, None] - 1)
    real = np.flatnonzero(back < rows[:, None])
    padding = tokens.max() - tokens
    slots = np.stack([np.pad(piece.slots, (pad, 0), "edge") for piece, pad in zip(pieces, padding, strict=True)])
    arrays = grid.astype(np.int64), real, slots, padding.astype(np.int64), tree.positions[grid]
    at, flat, of, before, positions = (torch.from_numpy(array).to(device) for array in arrays)
    places = (torch.arange(int(tokens.max()), device=device) - before[:, None])[:, None]
    visible = (places >= 0) & (places <= positions[..., None])
    return Block(pieces[0].first, pieces[-1].last, at, flat, of, before, visible)
