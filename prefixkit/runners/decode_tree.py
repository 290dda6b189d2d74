"""The tree that a captured decode step runs over: arrays on a device, at addresses that stay, which grow there."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from prefixkit.attention.decode_batch import DecodeBatch
from prefixkit.attention.staging import Staged
from prefixkit.tree.snapshot import Ints

if TYPE_CHECKING:
    from prefixkit.cuda.jit import Function
    from prefixkit.cuda.struct_layout import Struct

_THREADS = 128


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

    :meth:`load` brings a batch; each :meth:`advance` begins a step: every row one position further, its leaf one token longer.
    Rows beyond the batch's write nothing.

    Attributes:
        capacity: What a batch may hold.
        nodes: start, length, page_indptr, pages, first_slot, as ``tree_attention`` takes them.
        leaf: ``[rows]`` int32, -1 behind the batch's rows.
        drawn: ``[rows]`` int64 the tokens that the next step runs, written by whoever draws; may be another's tensor.
        tokens, positions, slots: ``[rows]`` int64, of the step; token 0 for what is no token.
    """

    def __init__(self, capacity: DecodeCapacity, page_size: int, device: torch.device | str) -> None:
        self.capacity, self.page_size = capacity, page_size
        target = torch.device(device)
        rows, nodes, pages = (max(1, n) for n in (capacity.rows, capacity.nodes, capacity.pages))
        self._staged = Staged([(nodes,), (nodes,), (nodes + 1,), (pages,), (nodes,), (rows,)], target)
        *self.nodes, self.leaf = self._staged.tensors
        self.drawn, self.tokens, self.positions = (
            torch.zeros(rows, dtype=torch.int64, device=target) for _ in range(3)
        )
        self.slots = torch.full((rows,), -1, dtype=torch.int64, device=target)
        self.leaf.fill_(-1)
        self._kernel = _kernel(self.leaf.device.index) if target.type == "cuda" else None

    def load(self, batch: DecodeBatch) -> None:
        """Bring a batch: one copy on the current stream, for which the host does not wait.  :meth:`advance` begins its step.

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
        if self._kernel is not None:
            self._advance_by_kernel(*self._kernel, rows)
        else:
            self._advance_in_torch(rows)

    def _advance_by_kernel(self, function: Function, layout: Struct, rows: int) -> None:
        from prefixkit.cuda.launch import launch

        tensors = (self.leaf, *self.nodes, self.drawn, self.tokens, self.positions, self.slots)
        values = (*(tensor.data_ptr() for tensor in tensors), rows, self.page_size)
        say = f"advance on {self.leaf.device}: {rows} rows of {self.capacity}".__str__
        launch(function, layout, values, (-(-rows // _THREADS), 1, 1), _THREADS, 0, say)

    def _advance_in_torch(self, rows: int) -> None:
        start, length, page_indptr, pages, first_slot = self.nodes
        leaf = self.leaf[:rows].long()
        padding, node = leaf < 0, leaf.clamp(min=0)
        offset = length[node].long()
        within = first_slot[node] + offset
        page = page_indptr[node] + within // self.page_size
        there = (page < page_indptr[node + 1]) & ~padding
        slot = pages[torch.where(there, page, 0)].long() * self.page_size + within % self.page_size
        self.slots[:rows] = torch.where(there, slot, -1)
        self.positions[:rows] = torch.where(padding, 0, start[node] + offset - (~there).long())
        self.tokens[:rows] = torch.where(padding, 0, self.drawn[:rows].clamp(min=0))
        length[node[there]] += 1


def _before(batch: DecodeBatch) -> Ints:
    """``[nodes]`` tokens with KV before the batch's step."""
    length = batch.snapshot.ready.copy()
    length[batch.leaf] = batch.snapshot.length[batch.leaf] - 1
    return length


def _kernel(device: int) -> tuple[Function, Struct]:
    from prefixkit.backends.cuda import layouts
    from prefixkit.backends.cuda.units import ADVANCE
    from prefixkit.cuda import jit

    function = jit.load(ADVANCE, device)[ADVANCE.names[0]]
    layouts.ADVANCE.check(function)
    return function, layouts.ADVANCE
