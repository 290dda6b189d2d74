"""Which nodes are worth sharing: a linear cost model of one layer's attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.snapshot import Ints, TreeSnapshot


@dataclass(frozen=True)
class CostModel:
    """What the parts of one layer's attention cost, in microseconds.

    Attributes:
        item: A work item of its own: launching it, or one more library call.
        kv_byte: Reading one byte of K or V.
        partial_byte: Writing one byte of a partial state and reading it back to merge it.
    """

    item: float
    kv_byte: float
    partial_byte: float

    def __post_init__(self) -> None:
        for name in ("item", "kv_byte", "partial_byte"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"CostModel: {name} must be a time of at least 0 us, got {value!r}")


# One thread of a 2.6 GHz x86 server core, float32: gathering and reading a private token of 1.5 KB takes 0.1 us, an extra
# item 30 us, an extra partial row of 2.3 KB 0.7 us.
CPU_COST = CostModel(item=30.0, kv_byte=6.5e-5, partial_byte=3e-4)


@dataclass(frozen=True)
class HeadShape:
    """The attention heads of one layer, as far as cost and tiles depend on them."""

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """Bytes of one query's partial state: float32 output and log-sum-exp of all heads."""
        return 4 * self.heads * (self.head_dim + 1)


def decide_sharing(
    snapshot: TreeSnapshot, own_rows: Ints, rows_below: Ints, shape: HeadShape, cost: CostModel
) -> NDArray[np.bool_]:
    """Decide for each node whether its KV is read once for all queries below it, or once for each row that needs it.

    A shared node costs one more item and one more partial state for each query below; a folded one is read again by each
    of its consumers, the rows among its descendants which its tokens then join.  The choice is made bottom-up: what a
    node's children decided tells how many consumers it has.  A node with one consumer always folds.

    Args:
        snapshot: The tree.
        own_rows: ``[nodes]`` queries that sit in the node itself.
        rows_below: ``[nodes]`` queries that sit in its proper descendants.
        shape: The heads.
        cost: The cost model.

    Returns:
        ``[nodes]`` True where the node is shared; False also where no query sits below.
    """
    gain_per_token = cost.kv_byte * shape.kv_bytes
    price_per_row = cost.partial_byte * shape.partial_bytes
    parent, length = snapshot.parent.tolist(), snapshot.length.tolist()
    own, below = own_rows.tolist(), rows_below.tolist()
    consumers = [0] * len(parent)
    shared = np.zeros(len(parent), dtype=bool)
    for node in range(len(parent) - 1, -1, -1):
        if not own[node] and not below[node]:
            continue
        passed_up = consumers[node]
        if below[node]:
            gain = (consumers[node] - 1) * length[node] * gain_per_token
            if gain > cost.item + below[node] * price_per_row:
                shared[node] = True
                passed_up = 1
        if parent[node] >= 0:
            consumers[parent[node]] += passed_up + (1 if own[node] else 0)
    return shared
