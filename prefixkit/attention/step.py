"""One forward pass: which tokens run, where their KV goes, and how they attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.planner import Array, Planner, StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.state_batches import StateBatch, state_batches
from prefixkit.tree.arrays import Ints
from prefixkit.tree.state_slots import StateMoves


@dataclass(frozen=True, eq=False)
class Step:
    """All that one forward pass over ``T`` tokens of a tree needs.

    Attributes:
        tokens: ``[T]`` int64 token ids, in depth-first order of the tree.
        positions: ``[T]`` int64 positions in their sequences.
        slots: ``[T]`` int64 pool slots that receive their K and V; -1 for a token that has KV already and reruns for
            its logits: nothing is written.
        logit_rows: ``[R]`` int64 rows whose logits are wanted, ascending where a patched model runs the step.
        length: ``[nodes]`` tokens of each node that have KV in this step, on the host.
        plans: A plan for each kind of layers, on the device of these layers.
        layer_counts: How many layers are of each kind.
        states: The batches in which tokens run through layers that keep a state, if any.
        own_logits: Whether each process of a split model may return the logits of its part of ``logit_rows`` alone:
            equal parts, in the order of the processes.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    length: Ints
    plans: tuple[StepPlan, ...]
    layer_counts: tuple[int, ...] = (1,)
    states: tuple[StateBatch, ...] = ()
    own_logits: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def on(self, device: torch.device) -> Step:
        """The step for layers on another device: what layers read of it is copied, on the current streams."""
        states = tuple(batch.on(device) for batch in self.states)
        return replace(self, positions=self.positions.to(device), slots=self.slots.to(device), states=states)

    @property
    def plan(self) -> list[Tensor]:
        """The first kind's plan as ``tree_attention`` takes it."""
        return self.plans[0].tensors

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Token KVs that attention reads in a layer, and would read without sharing: means over all layers.

        Computed on access, preferably while a GPU runs the step.
        """
        return mean_reads(self.plans, self.layer_counts, self.plans[0].tree)


def build_step(
    tree: StepTree,
    tokens: NDArray[np.integer],
    logit_rows: NDArray[np.integer],
    planners: Planner | Sequence[Planner],
    device: torch.device | str = "cpu",
    layer_counts: tuple[int, ...] = (1,),
    states: StateMoves | None = None,
    plan_devices: Sequence[torch.device] = (),
) -> Step:
    """Assemble the step that computes the queries of ``tree``.

    Args:
        tree: The tree, with slots for the queries' KV already allocated, and the tokens that run.
        tokens, logit_rows: See :class:`Step`.
        planners: The planner of each kind of layers, which has its heads, costs and last plan.
        device: Where the tensors go.
        layer_counts: How many layers are of each kind.
        states: How layers that keep a state process the step.
        plan_devices: Where the plan of each planner goes, the first to ``device``; empty: all go there.

    Raises:
        ValueError: the queries do not compute KV that they need, or ``tokens`` does not match them.
    """
    queries, batches = tree.queries, () if states is None else state_batches(states.pieces, len(tokens))
    if len(tokens) != queries.num_rows:
        raise ValueError(f"the queries have {queries.num_rows} rows, but {len(tokens)} tokens were given")

    def gather() -> Sequence[Array]:
        arrays = [np.asarray(array, dtype=np.int64) for array in (tokens, tree.positions, slots_of(tree), logit_rows)]
        return [*arrays, *chain.from_iterable(batch.arrays for batch in batches)]

    first, *others = [planners] if isinstance(planners, Planner) else planners
    target = torch.device(device)
    planned, (ids, positions, slots, wanted, *of_states) = first.plan(tree, target, gather)
    left, places = iter(of_states), plan_devices[1:] or repeat(target)
    return Step(
        tokens=ids,
        positions=positions,
        slots=slots,
        logit_rows=wanted,
        length=tree.length,
        plans=(planned, *(planner.plan(tree, place)[0] for planner, place in zip(others, places, strict=False))),
        layer_counts=layer_counts,
        states=tuple(batch.on_device(left) for batch in batches),
    )


def slots_of(tree: StepTree) -> NDArray[np.int64]:
    """``[rows]`` pool slots that receive the K and V of a step's query rows; -1 for tokens that have KV already.

    Existing KV is not overwritten: other queries may have read it, and recomputed KV differs by rounding.
    """
    node, offset = tree.queries.row_node(), tree.queries.row_offset()
    return np.where(offset < tree.snapshot.computed[node], -1, tree.snapshot.slots(node, offset)).astype(np.int64)


def mean_reads(plans: Sequence[StepPlan], layer_counts: Sequence[int], tree: StepTree) -> tuple[int, int]:
    """Token KVs that a layer of a step reads, and would read without sharing: means over all layers.

    Args:
        plans, layer_counts: The plan of each kind of layers, and how many layers are of this kind.
        tree: The tree of the plans, whose leaves may have grown since.
    """
    layers = sum(count for plan, count in zip(plans, layer_counts, strict=True) if not plan.adds)
    read, unshared = np.dot(layer_counts, [plan.kv_tokens(tree) for plan in plans]) / layers
    return round(float(read)), round(float(unshared))
