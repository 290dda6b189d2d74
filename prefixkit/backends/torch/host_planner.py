"""Plans for the torch backend: made on the host, and passed to the op as a handle."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.gpu.staging import upload
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.attention.planner import Planner, StepArrays, StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.attention.variants import lookup
from prefixkit.attention.visible import ALL, Visible
from prefixkit.backends.torch import tuning
from prefixkit.backends.torch.program.layer_program import Program, compile_program
from prefixkit.backends.torch.tuning import Heads


class NoSuchPlan(ValueError):
    """A handle names no plan that is alive."""


class BoundPlan:
    """A plan bound to the lengths and positions of one step, with the programs that layers have used.

    Attributes:
        shape: The heads for which it was planned, if known.
    """

    def __init__(self, plan: Plan, tree: StepTree, shape: HeadShape | None = None) -> None:
        self.plan, self.tree, self.shape = plan, tree, shape
        self._programs: dict[tuple[object, ...], Program] = {}

    def program(
        self,
        pool_shape: Sequence[int],
        heads: int,
        dtype: torch.dtype,
        device: torch.device,
        key: str,
        v_dim: int | None = None,
        *,
        expanded: bool = False,
        scored: bool = False,
    ) -> Program:
        """The program for K in pages of a shape, ``heads`` query heads and a variant's key, compiled at its first use.

        ``v_dim``: the size of V's heads, if it differs; ``expanded``, ``scored``: as
        :func:`compile_program` takes them.

        Raises:
            IndexError: the tree names a slot that the pool does not have.
        """
        on_cpu = device.type == "cpu"
        costs = tuning.CPU if on_cpu else tuning.GPU
        v_dim = pool_shape[3] if v_dim is None else v_dim
        variant = lookup(key)
        changes = key, variant.versions  # masks depend on the tensors that the variant captures
        signature = (*pool_shape, heads, dtype, device, changes, v_dim, expanded, scored, id(costs))  # held by it
        if signature not in self._programs:
            num_pages, _, kv_heads, head_dim = pool_shape
            layer = Heads(heads, kv_heads, head_dim, dtype.itemsize, v_dim, tuning=costs)
            program = compile_program(
                self.plan,
                self.tree,
                num_pages,
                layer,
                variant,
                dtype,
                on_cpu=on_cpu,
                device=device,
                expanded=expanded,
                scored=scored,
            )
            self._programs[signature] = program if on_cpu else program.to(device)
        return self._programs[signature]


_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, BoundPlan] = weakref.WeakValueDictionary()


def find_plan(handle: Tensor) -> BoundPlan:
    """The plan that a handle names; NoSuchPlan if the tensor is no handle, or its step was freed before the run."""
    if handle.dtype != torch.int64 or handle.shape != (1,):
        raise NoSuchPlan(
            f"tree_attention: plan must end with a handle, an int64 tensor of one number, got {handle.dtype} of shape "
            f"{list(handle.shape)}; pass Step.plan as it is"
        )
    number = int(handle)
    plan = _alive.get(number)
    if plan is None:
        raise NoSuchPlan(f"tree_attention: plan {number} is gone; keep the Step until the model has run it")
    return plan


class TorchPlanner(Planner):
    """Plans for plain torch, on a CPU or a GPU: each row of the formats is one item."""

    def specify(self, tree: StepTree) -> Plan:
        return make_plan(self.formats(tree), tree.length, tree.queries.num_rows)

    def _make(self, tree: StepTree, device: torch.device, step_arrays: StepArrays) -> tuple[StepPlan, list[Tensor]]:
        return bind(self.specify(tree), tree, self.shape), upload(step_arrays(), device)

    def _renew(
        self, last: StepPlan, tree: StepTree, device: torch.device, step_arrays: StepArrays
    ) -> tuple[StepPlan, list[Tensor]]:
        return bind(last.plan, tree, self.shape), upload(step_arrays(), device)


def bind(plan: Plan, tree: StepTree, shape: HeadShape | None = None) -> StepPlan:
    """A plan on the host, ready for the torch backend's op; ``shape``: the heads that it was made for."""
    # An op cannot take a Python object, so it gets a handle: a tensor that names the plan while the step is referenced.
    bound, number = BoundPlan(plan, tree, shape), next(_numbers)
    _alive[number] = bound
    return StepPlan([torch.tensor([number], device="cpu")], tree, lambda: plan, owners=bound)


def planner_for(shape: HeadShape, device: torch.device, dtype: torch.dtype, visible: Visible = ALL) -> TorchPlanner:
    """The planner for plain torch, on a CPU or a GPU."""
    return TorchPlanner(shape, CPU_COST if device.type == "cpu" else H200.sharing, visible)
