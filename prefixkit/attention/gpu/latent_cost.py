"""Which nodes of a tree to expand in attention over latents on a GPU: a cost model of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.bsr import BSR
from prefixkit.attention.latent_parts import LatentPart
from prefixkit.attention.queries import StepTree


@dataclass(frozen=True)
class LatentCost:
    """What attention over latents costs, in microseconds.

    Attributes:
        absorbed, expanded, made: One floating-point operation of absorbed attention, of attention over K and V, and of
            making K and V.
        byte: Reading or writing one byte.
        read: Reading one byte of K or V.
        part: One more part of a step: its kernel, and the merge.
        tile: Queries are rounded up to a multiple of this in attention over K and V: fewer take as long.
        keeps_for: The number of steps that use a node's K and V once they are cached from step to step.
    """

    absorbed: float = 1 / 610e6
    expanded: float = 1 / 640e6
    made: float = 1 / 600e6
    byte: float = 1 / 4.3e6
    read: float = 1 / 3.6e6
    part: float = 20.0
    tile: int = 64
    keeps_for: int = 32


H200_LATENTS = LatentCost()


@dataclass(frozen=True, eq=False)
class Expanded:
    """The nodes of a step's tree that are expanded.

    Attributes:
        nodes: ``[nodes]`` True where a node is shared, and its K and V are made for all queries below it.
        keeps: Whether these K and V should be reused from step to step.
    """

    nodes: NDArray[np.bool_]
    keeps: bool


def made_bytes(part: LatentPart) -> int:
    """Bytes of the K and V made for one token; all heads share the rotary part of K."""
    whole = part.whole
    return whole.itemsize * (whole.heads * (whole.head_dim - part.rotary + whole.value_dim) + part.rotary)


def choose_expanded(tree: StepTree, part: LatentPart, cost: LatentCost, most_kept: int) -> Expanded:
    """Choose the nodes to expand: if K and V of all nodes that pay when reused have at most ``most_kept`` tokens, these
    nodes; else those that pay even if K and V are made at every step.  Only decode steps reuse K and V, and only over
    snapshots that have ``content``.
    """
    length = tree.length.astype(np.int64)
    if tree.snapshot.content is not None and bool((tree.own_rows <= 1).all()):
        nodes = _pays(tree, part, cost, 1 / cost.keeps_for)
        if int(length[nodes].sum()) <= most_kept:
            return Expanded(nodes, keeps=True)
    return Expanded(_pays(tree, part, cost, 1.0), keeps=False)


def _pays(tree: StepTree, part: LatentPart, cost: LatentCost, share: float) -> NDArray[np.bool_]:
    """``[nodes]`` True for nodes that are cheaper expanded, if ``share`` of the cost of making K and V counts."""
    whole, below, length = part.whole, tree.below.astype(np.float64), tree.length.astype(np.float64)
    absorbed = below * length * _absorbed_flops(part) * cost.absorbed
    rows = -(-below // cost.tile) * cost.tile
    products = rows * length * (2 * whole.heads * (whole.head_dim + whole.value_dim)) * cost.expanded
    expanded = np.maximum(products, length * made_bytes(part) * cost.read)
    merged = below * (6 * whole.heads * whole.value_dim * cost.byte)
    gain = np.where(below > 0, absorbed - expanded - merged - share * length * _made_us(part, cost), 0.0)
    nodes: NDArray[np.bool_] = gain > 0
    return nodes if gain[nodes].sum() > cost.part else np.zeros_like(nodes)


def expands_own(bsr: BSR, tree: StepTree, part: LatentPart, cost: LatentCost) -> NDArray[np.bool_]:
    """``[rows]`` True for own-node BSR rows that are cheaper expanded: those of prompts."""
    whole, queries = part.whole, (bsr.q_end - bsr.q_begin).astype(np.int64)
    seen = np.minimum(bsr.end, tree.length[bsr.node]).astype(np.int64) - bsr.begin
    tokens = np.add.reduceat(seen, bsr.indptr[:-1])
    pairs = queries * tokens - queries * (queries - 1) // 2
    attended = pairs * (2 * whole.heads * (whole.head_dim + whole.value_dim)) * cost.expanded
    expanded = attended + tokens * _made_us(part, cost) + cost.part
    own: NDArray[np.bool_] = bsr.causal & (expanded < pairs * _absorbed_flops(part) * cost.absorbed)
    return own


def _absorbed_flops(part: LatentPart) -> int:
    return 2 * part.whole.heads * (2 * part.latent + part.rotary)


def _made_us(part: LatentPart, cost: LatentCost) -> float:
    """Time to make K and V of one token: the products, and writing K and V."""
    whole = part.whole
    flops = 2 * part.latent * whole.heads * (whole.head_dim - part.rotary + whole.value_dim)
    return flops * cost.made + made_bytes(part) * cost.byte
