"""One forward pass: which tokens run, where their KV goes, and how they attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.planner import Array, Planner, StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.tree.arrays import Ints


@dataclass(frozen=True, eq=False)
class Step:
    """All that one forward pass over ``T`` tokens of a tree needs.

    Attributes:
        tokens: ``[T]`` int64 token ids, in depth-first order of the tree.
        positions: ``[T]`` int64 positions in their sequences.
        slots: ``[T]`` int64 pool slots that receive their K and V; -1 writes nothing: that of a token that is computed
            already, and runs again for its logits.
        logit_rows: ``[R]`` int64 rows whose logits are wanted, ascending.
        length: ``[nodes]`` tokens of each node that are visible in this step, on the host.
        kv_tokens_unshared: What the queries would read in one layer if no sequence shared.
        planned: The plan.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    length: Ints
    kv_tokens_unshared: int
    planned: StepPlan

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def plan(self) -> list[Tensor]:
        """The plan as ``tree_attention`` takes it."""
        return self.planned.tensors

    @property
    def kv_tokens_read(self) -> int:
        """Token KVs that attention reads in one layer; computed when asked for, so best while a GPU runs the step."""
        return self.planned.kv_tokens_read(self.length)


def build_step(
    tree: StepTree,
    tokens: NDArray[np.integer],
    logit_rows: NDArray[np.integer],
    planner: Planner,
    device: torch.device | str = "cpu",
) -> Step:
    """Assemble the step that computes the queries of ``tree``.

    Args:
        tree: The tree, with slots for the queries' KV already taken, and which tokens run.
        tokens, logit_rows: See :class:`Step`.
        planner: Holds heads, costs and the last plan.
        device: Where the tensors go.

    Raises:
        ValueError: the queries leave out KV that they need, or ``tokens`` does not match them.
    """
    queries = tree.queries
    if len(tokens) != queries.num_rows:
        raise ValueError(f"the queries have {queries.num_rows} rows, but {len(tokens)} tokens were given")

    def gather() -> Sequence[Array]:
        node, offset = queries.row_node(), queries.row_offset()
        # KV that exists is not overwritten: others may have read it, and what is computed again differs by rounding.
        slots = np.where(offset < tree.snapshot.computed[node], -1, tree.snapshot.slots(node, offset))
        return [np.asarray(array, dtype=np.int64) for array in (tokens, tree.positions, slots, logit_rows)]

    planned, (ids, positions, slots, wanted) = planner.plan(tree, torch.device(device), gather)
    return Step(
        tokens=ids,
        positions=positions,
        slots=slots,
        logit_rows=wanted,
        length=tree.length,
        kv_tokens_unshared=int((tree.positions + 1).sum()),
        planned=planned,
    )
