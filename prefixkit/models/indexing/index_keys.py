"""Index keys of one layer in the pool, and the layer's indexer, which reads them in a step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.models.indexing.compressors import Entries, compress, sizes_of
from prefixkit.models.indexing.indexers import Block, IndexerCall, IndexKeys, blocks_of, in_texts, joined
from prefixkit.models.model_errors import IncompleteStep
from prefixkit.models.steps.layer_pages import LayerPages


class _Appended(Exception):
    """Ends a call of the indexer after its keys are appended to the pool, because nothing has to be scored."""


class StepIndexer:
    """A layer's indexer in a step.

    Args:
        own: The layer.
        step: The step.
        blocks: The blocks of rows that :func:`blocks_of` makes, by plan index; made by the first layer of a step.

    Raises:
        IncompleteStep: the probe of the model has found no indexer in the layer.
    """

    def __init__(self, own: LayerPages, step: Step, blocks: dict[int, list[Block]]) -> None:
        kind = own.kind
        if own.index_pages is None or kind.index_dtype is None or kind.selects is None:
            raise IncompleteStep(f"StepCache: layer {own.index} had no indexer when the model was measured")
        self._own, self._step, self._blocks = own, step, blocks
        self._pages, self._dtype, self._most = own.index_pages, kind.index_dtype, kind.selects

    def select(self, call: IndexerCall) -> Tensor:
        """``[1, T, k]`` int32 or ``[1, T, positions]`` bool: see :class:`SelectingLayer`."""
        tree = self._step.plans[self._own.plan].tree
        if int(tree.positions.max()) < self._most:
            return self._all(call)
        if self._own.plan not in self._blocks:
            self._blocks[self._own.plan] = blocks_of(tree, self._pages.device)
        parts = []
        for block in self._blocks[self._own.plan]:
            keys = IndexKeys(partial(self._exchange, block), block)
            parts.append(in_texts(block, call.run(keys, block, is_empty)))
        return joined(parts)

    def _all(self, call: IndexerCall) -> Tensor:
        """No indices, or a mask of no tokens: texts are so short that all tokens are selected, and none is scored."""
        rows = self._step.slots.shape[0]
        at = torch.arange(rows, device=self._pages.device)
        none = at.new_empty((1, rows, 0), dtype=torch.bool)
        block = Block(0, rows, at[None], at, at[None], at.new_zeros(1), none)

        def exchange(keys: Tensor) -> Tensor:
            self._append(block, keys)
            raise _Appended

        try:
            call.run(IndexKeys(exchange, block), block, is_empty)
        except _Appended:
            return none if self._own.kind.selection_is_mask else none.to(torch.int32)
        raise IncompleteStep(f"StepCache: the indexer of layer {self._own.index} has cached no keys in this step")

    def _append(self, block: Block, keys: Tensor) -> None:
        if keys.dtype != self._dtype:
            raise ValueError(
                f"StepCache: the indexer of layer {self._own.index} made keys of {keys.dtype}, but of {self._dtype} "
                "when the model was measured"
            )
        rows = keys.flatten(0, 1)[block.real].contiguous().view(self._pages.dtype)
        torch.ops.prefixkit.index_append(rows[:, None], self._pages, self._step.slots[block.first : block.last])

    def _exchange(self, block: Block, keys: Tensor) -> Tensor:
        """Append a block's index keys ``[texts, S, dim]``, and return all keys of its texts, ``[texts, T, dim]``."""
        self._append(block, keys)
        return index_keys_at(self._pages, block.slots, self._dtype).masked_fill_((block.places < 0)[..., None], 0)


class StepCompressor:
    """A layer's compressor in a step; arguments as for :class:`StepIndexer`, but blocks have no padding.

    Raises:
        IncompleteStep: the probe of the model has found no compressor in the layer.
    """

    def __init__(self, own: LayerPages, step: Step, blocks: dict[int, list[Block]]) -> None:
        if not own.compressed_pages:
            raise IncompleteStep(f"StepCache: layer {own.index} had no compressor when the model was measured")
        self._own, self._step = own, step
        if own.plan not in blocks:
            tree = step.plans[own.plan].tree
            blocks[own.plan] = blocks_of(tree, own.compressed_pages[0].device, padded=False)
        self._blocks = blocks[own.plan]

    def entries(self, call: IndexerCall) -> list[Entries]:
        """The compressor's entries for each block; IncompleteStep if it does not cache what it did when measured."""
        names = set[str]()
        made = [compress(call, block, partial(self._exchange, names, block)) for block in self._blocks]
        if len(names) != len(self._own.compressed_pages):
            raise IncompleteStep(
                f"StepCache: the compressor of layer {self._own.index} has cached {sorted(names)} alone"
            )
        return made

    def _exchange(self, names: set[str], block: Block, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        kind = sizes_of(self._own.kind.compressed, name)
        pages = self._own.compressed_pages[self._own.kind.compressed.index(kind)]
        rows = torch.cat((kv, gate), -1).flatten(0, 1)[block.real]
        torch.ops.prefixkit.index_append(rows[:, None], pages, self._step.slots[block.first : block.last])
        names.add(name)
        found = index_keys_at(pages, block.slots, pages.dtype)
        return found[..., : kind.kv], found[..., kind.kv :]


def index_keys_at(pages: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., dim]`` the index keys in slots ``[...]`` of ``pages``, whose bytes are read as ``dtype``."""
    size = pages.shape[1]
    return pages[slots // size, slots % size].squeeze(-2).contiguous().view(dtype)


def is_empty(tensor: Tensor) -> bool:
    """Whether a tensor is the mask of a step, which has no elements."""
    return not tensor.numel()
