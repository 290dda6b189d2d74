"""Plans for the torch backend: made on the host, and handed to the op as a handle."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.bsr import Queries, visible_lengths
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.attention.planner import Beside, Planner, StepPlan
from prefixkit.attention.staging import upload
from prefixkit.attention.variants import lookup
from prefixkit.backends.torch import tuning
from prefixkit.backends.torch.batches import Heads
from prefixkit.backends.torch.pieces import Work
from prefixkit.backends.torch.program import Program, compile_program
from prefixkit.tree.snapshot import TreeSnapshot


class NoSuchPlan(ValueError):
    """A handle names no plan that is alive."""


class BoundPlan:
    """A plan bound to the lengths and positions of one step, with the programs that layers have asked for.

    An op cannot take a Python object, so it takes :attr:`handle`: an int64 CPU tensor that names this plan for as long as the
    plan is referenced.
    """

    def __init__(self, plan: Callable[[], Plan], snapshot: TreeSnapshot, queries: Queries) -> None:
        self._plan, self._snapshot, self._queries = plan, snapshot, queries
        self._work: Work | None = None
        self._programs: dict[tuple[object, ...], Program] = {}
        number = next(_numbers)
        self.handle = torch.tensor([number])
        _alive[number] = self

    def program(
        self, pool_shape: Sequence[int], heads: int, dtype: torch.dtype, device: torch.device, key: str
    ) -> Program:
        """The program for a pool and a variant, compiled the first time that a layer asks for it.

        Args:
            pool_shape: ``[pages, page_size, kv_heads, head_dim]``.
            heads: Query heads.
            dtype, device: Of the queries and pages.
            key: The variant's key.

        Raises:
            IndexError: the tree names a slot that the pool does not have.
        """
        on_cpu = device.type == "cpu"
        costs = tuning.CPU if on_cpu else tuning.GPU
        asked = (*pool_shape, heads, dtype, device, key, costs)
        if asked not in self._programs:
            num_pages, _, kv_heads, head_dim = pool_shape
            program = compile_program(
                self.work,
                num_pages,
                Heads(heads, kv_heads, head_dim, costs),
                lookup(key),
                exact_views=on_cpu and dtype == torch.float32,
                flash=on_cpu,
            )
            self._programs[asked] = program if on_cpu else program.to(device)
        return self._programs[asked]

    @property
    def num_rows(self) -> int:
        """Query rows that it is for."""
        return self._queries.num_rows

    @property
    def work(self) -> Work:
        """The plan in numpy."""
        if self._work is None:
            snapshot, queries = self._snapshot, self._queries
            positions = snapshot.start[queries.row_node()].astype(np.int64) + queries.row_offset()
            self._work = Work.of(self._plan(), snapshot, visible_lengths(snapshot, queries), positions)
        return self._work


_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, BoundPlan] = weakref.WeakValueDictionary()


def find_plan(handle: Tensor) -> BoundPlan:
    """The plan that a handle names.

    Raises:
        NoSuchPlan: it is gone; the step that it was made for must be kept until the model has run.  Or the tensor is no
            handle.
    """
    if handle.dtype != torch.int64 or handle.shape != (1,):
        raise NoSuchPlan(
            f"tree_attention: plan must end with a handle, an int64 tensor of one number, got {handle.dtype} of shape "
            f"{list(handle.shape)}; pass Step.plan as it is"
        )
    number = int(handle)
    found = _alive.get(number)
    if found is None:
        raise NoSuchPlan(f"tree_attention: plan {number} is gone; keep the Step until the model has run it")
    return found


class TorchPlanner(Planner):
    """Plans for plain torch, on a CPU or a GPU: every row of the formats is one item, and programs batch items into calls."""

    def specify(self, snapshot: TreeSnapshot, queries: Queries) -> Plan:
        return make_plan(self.formats(snapshot, queries), visible_lengths(snapshot, queries), queries.num_rows)

    def _make(
        self, snapshot: TreeSnapshot, queries: Queries, device: torch.device, beside: Beside
    ) -> tuple[StepPlan, list[Tensor]]:
        plan = self.specify(snapshot, queries)
        return bind(plan, snapshot, queries), upload(beside(), device)

    def _renew(
        self, last: StepPlan, snapshot: TreeSnapshot, queries: Queries, device: torch.device, beside: Beside
    ) -> tuple[StepPlan, list[Tensor]]:
        return bind(last.plan, snapshot, queries), upload(beside(), device)


def bind(plan: Plan, snapshot: TreeSnapshot, queries: Queries) -> StepPlan:
    """A plan on the host, ready for the torch backend's op."""
    bound = BoundPlan(lambda: plan, snapshot, queries)
    return StepPlan([bound.handle], snapshot, queries, lambda: plan, holds=bound)
