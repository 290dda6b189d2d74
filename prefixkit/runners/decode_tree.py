"""The tree that a captured decode step runs over: arrays on a device, at addresses that stay, which grow there."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

import prefixkit.ops.library  # noqa: F401 - declares torch.ops.prefixkit
from prefixkit.attention.decode_batch import DecodeBatch
from prefixkit.attention.staging import Staged
from prefixkit.tree.snapshot import Ints


class BatchTooLarge(ValueError):
    """A batch does not fit the arrays made for it."""


@dataclass(frozen=True)
class DecodeCapacity:
    """How much a batch may hold: rows, nodes of its tree, pages of all nodes."""

    rows: int
    nodes: int
    pages: int

    @staticmethod
    def of(batch: DecodeBatch) -> DecodeCapacity:
        """What this batch needs."""
        return DecodeCapacity(batch.num_rows, batch.snapshot.num_nodes, len(batch.snapshot.pages))

    def holds(self, need: DecodeCapacity) -> bool:
        return all(getattr(self, field.name) >= getattr(need, field.name) for field in fields(self))


class DecodeTree:
    """A :class:`DecodeBatch` where a model runs it.

    :meth:`load` brings a batch; each :meth:`advance` begins a step: every row one position further, its leaf one token
    longer.  Rows beyond the batch's write nothing.

    Attributes:
        capacity: What a batch may hold.
        nodes: start, length, page_indptr, pages, first_slot, as ``tree_attention`` takes them.
        leaf: ``[rows]`` int32, -1 behind the batch's rows.
        sampled: ``[rows]`` int64 the tokens that the next step runs, written by the sampler; may be the sampler's
            tensor.
        tokens, positions, slots: ``[rows]`` int64, of the step; token 0 for what is no token.
    """

    def __init__(self, capacity: DecodeCapacity, page_size: int, device: torch.device | str) -> None:
        self.capacity, self.page_size = capacity, page_size
        target = torch.device(device)
        rows, nodes, pages = (max(1, n) for n in (capacity.rows, capacity.nodes, capacity.pages))
        self._staged = Staged([(nodes,), (nodes,), (nodes + 1,), (pages,), (nodes,), (rows,)], target)
        *self.nodes, self.leaf = self._staged.tensors
        self.sampled, self.tokens, self.positions = (
            torch.zeros(rows, dtype=torch.int64, device=target) for _ in range(3)
        )
        self.slots = torch.full((rows,), -1, dtype=torch.int64, device=target)
        self.leaf.fill_(-1)

    def load(self, batch: DecodeBatch) -> None:
        """Bring a batch: one copy on the current stream, without a wait of the host.  :meth:`advance` begins its step.

        Raises:
            BatchTooLarge: it does not fit; nothing has changed.
        """
        need = DecodeCapacity.of(batch)
        if not self.capacity.holds(need):
            raise BatchTooLarge(f"a batch of {need} does not fit {self.capacity}; make a DecodeTree as large as that")
        tree, nodes = batch.snapshot, batch.snapshot.num_nodes
        *arrays, leaf = self._staged.begin()
        for staged, array in zip(
            arrays, (tree.start, _before(batch), tree.page_indptr, tree.pages, tree.first_slot), strict=True
        ):
            staged[: len(array)] = array
        arrays[2][nodes + 1 :] = tree.page_indptr[-1]
        leaf[: batch.num_rows], leaf[batch.num_rows :] = batch.leaf, -1
        self._staged.send()

    def advance(self, rows: int) -> None:
        """Begin the next step of the first ``rows`` rows, on the current stream.  Can be captured."""
        torch.ops.prefixkit.advance(
            self.leaf, *self.nodes, self.sampled, self.tokens, self.positions, self.slots, rows, self.page_size
        )


def _before(batch: DecodeBatch) -> Ints:
    """``[nodes]`` tokens with KV before the batch's step."""
    length = batch.snapshot.computed.copy()
    length[batch.leaf] = batch.snapshot.length[batch.leaf] - 1
    return length
