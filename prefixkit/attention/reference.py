"""Dense float64 attention over a tree: the oracle that all other implementations are tested against.

A query at node ``n`` and position ``p`` attends to every token of ``n``'s proper ancestors, and to ``n``'s tokens at
positions up to ``p``, or to all of ``n``'s tokens if the variant looks ahead.  Query head ``h`` reads KV head
``h // (heads // kv_heads)``.  A variant's Python functions are called untraced, and its transforms too: on queries, on
all keys and values that a query sees, and on outputs.  Under a streaming variant queries attend to the sinks from their
positions in the cache.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from einops import einsum, repeat
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.variants.evaluate import pointwise
from prefixkit.attention.variants.variant import CAUSAL, Variant
from prefixkit.tree.snapshot import TreeSnapshot

Numbers = NDArray[np.integer]


class Exact(NamedTuple):
    """Attention of some queries in float64.

    Attributes:
        out: ``[rows, heads, v_dim]`` float64.
        lse: ``[rows, heads]`` float64, natural logarithm of the softmax's denominator; -inf where nothing is visible.
    """

    out: Tensor
    lse: Tensor


class Rows(NamedTuple):
    """What a variant reads of queries: their sequences' numbers and their positions, ``[rows]`` int64 each."""

    sequences: Tensor
    positions: Tensor


def reference_attention(
    snapshot: TreeSnapshot,
    query_node: Numbers,
    query_position: Numbers,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant = CAUSAL,
    sinks: Tensor | None = None,
    sequences: Numbers | None = None,
) -> Exact:
    """Attention of any queries over the tree, one run of queries of one node at a time.

    Args:
        snapshot: The tree.
        query_node: ``[rows]`` integers: the node of each query.
        query_position: ``[rows]`` integers: the position of each query in its sequence.
        q: ``[rows, heads, head_dim]`` any float dtype, on any device.
        k_pages, v_pages: ``[pages, page_size, kv_heads, head_dim]`` any float dtype; heads of V may have another size.
            If the variant transforms keys or values, they hold those before the transform.
        scale: Factor on ``q . k``.
        variant: The variant of attention.
        sinks: ``[heads]`` logits of any float dtype that join the softmax's denominator, for a variant that has sinks.
        sequences: ``[rows]`` integers: numbers of the queries' sequences, which a variant sees as ``b``; 0 if None.
    """
    numbers = np.zeros(len(query_node), dtype=np.int64) if sequences is None else sequences
    starts = np.flatnonzero(np.diff(query_node, prepend=-1))
    parts = []
    for run in (slice(*bounds) for bounds in pairwise([*starts.tolist(), len(query_node)])):
        node, positions = int(query_node[run][0]), query_position[run]
        last = None if variant.looks_ahead else int(positions.max())
        slots, kv_positions = (torch.from_numpy(each).to(q.device) for each in visible_tokens(snapshot, node, last))
        rows = Rows(*(torch.from_numpy(each.astype(np.int64)).to(q.device) for each in (numbers[run], positions)))
        keys = kv_positions, not variant.looks_ahead
        parts.append(attention_over(slots, *keys, rows, q[run], k_pages, v_pages, scale, variant, sinks))
    heads, v_dim = q.shape[1], v_pages.shape[3]
    out = torch.cat([part.out for part in parts]) if parts else q.new_zeros(0, heads, v_dim).double()
    lse = torch.cat([part.lse for part in parts]) if parts else q.new_zeros(0, heads).double()
    return Exact(out, lse)


def visible_tokens(
    snapshot: TreeSnapshot, node: int, position: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pool slots and positions of what a query sees, ``[tokens]`` int64 each, from the root down.

    Args:
        snapshot: The tree.
        node: The node of the query.
        position: The last position that the query sees; None: all tokens of its node.
    """
    path = [node]
    while snapshot.parent[path[-1]] >= 0:
        path.append(int(snapshot.parent[path[-1]]))
    counts = [int(snapshot.length[ancestor]) for ancestor in path]
    if position is not None:
        counts[0] = position + 1 - int(snapshot.start[node])
    nodes = np.concatenate([np.full(count, ancestor) for ancestor, count in zip(path[::-1], counts[::-1], strict=True)])
    offsets = np.concatenate([np.arange(count) for count in counts[::-1]])
    return snapshot.slots(nodes, offsets), snapshot.start[nodes].astype(np.int64) + offsets


def attention_over(
    slots: Tensor,
    kv_positions: Tensor,
    causal: bool,
    rows: Rows,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant = CAUSAL,
    sinks: Tensor | None = None,
) -> Exact:
    """Attention of queries to the keys in given slots.

    Args:
        slots: ``[len]`` int64 pool slots of the keys.
        kv_positions: ``[len]`` int64 positions of the keys.
        causal: Whether keys after a query are hidden from it.
        rows: What the variant reads of the queries.
        q: ``[rows, heads, head_dim]`` any float dtype.
        k_pages, v_pages, scale, variant, sinks: As for :func:`reference_attention`.
    """
    heads, page_size, of = q.shape[1], k_pages.shape[1], variant.transforms.of
    group = heads // k_pages.shape[2]
    k, v = (pages[slots // page_size, slots % page_size].double() for pages in (k_pages, v_pages))
    k, v = of("key", k, kv_positions), of("value", v, kv_positions)
    k, v = (repeat(each, "len h dim -> len (h group) dim", group=group) for each in (k, v))
    head = torch.arange(heads, device=q.device)[:, None, None]

    def scores(positions: Tensor) -> Tensor:
        """``[heads, rows, len]`` of queries at these positions."""
        asked = of("query", q.double(), positions)
        score = scale * einsum(asked, k, "rows heads dim, len heads dim -> heads rows len")
        for mod in variant.score_mods:
            places = rows.sequences[:, None], head, positions[:, None], kv_positions
            score = pointwise(mod.function, score, *places).double()
        return score

    score, places = scores(rows.positions), (rows.sequences[:, None], head, rows.positions[:, None], kv_positions)
    visible, shown = (kv_positions <= places[2]) | (not causal), torch.ones_like(kv_positions, dtype=torch.bool)
    for mod in variant.mask_mods:
        shown = shown & pointwise(mod.function, *places)
    if (streaming := variant.streaming) is not None:
        is_sink = kv_positions < streaming.sinks
        score = torch.where(is_sink, scores(streaming.in_cache(rows.positions)), score)
        shown = shown | is_sink
    score = score.masked_fill(~(visible & shown), -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    if variant.has_sinks:
        assert sinks is not None, "the variant has sinks"
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    weight = torch.exp(score if variant.sums else score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = einsum(weight, v, "heads rows len, len heads dim -> rows heads dim")
    return Exact(of("output", out, rows.positions), lse.T)
