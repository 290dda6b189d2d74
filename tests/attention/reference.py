"""Dense float64 attention over a tree: the specification that everything faster is tested against.

A query at node ``n`` and position ``p`` attends to every token of ``n``'s proper ancestors, and to ``n``'s tokens at
positions up to ``p``.  Query head ``h`` reads KV head ``h // (heads // kv_heads)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from einops import einsum, repeat
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.bsr import BSR, MaskKind
from prefixkit.attention.queries import StepTree
from prefixkit.attention.variants import CAUSAL, Variant
from prefixkit.ops.partial_states import State
from prefixkit.tree.snapshot import TreeSnapshot


def reference_attention(
    snapshot: TreeSnapshot,
    query_node: NDArray[np.integer],
    query_position: NDArray[np.integer],
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant = CAUSAL,
    sinks: Tensor | None = None,
) -> State:
    """Attention of any queries over the tree, one run of queries of one node at a time.

    Args:
        snapshot: The tree.
        query_node: ``[rows]`` the node that each query sits in.
        query_position: ``[rows]`` its position in the sequence.
        q: ``[rows, heads, head_dim]`` any float dtype.
        k_pages, v_pages: ``[pages, page_size, kv_heads, head_dim]`` any float dtype; heads of V may have another size.
        scale: Factor on ``q . k``.
        variant: What else happens to the scores.
        sinks: ``[heads]`` logits that join the softmax's denominator, for a variant that has sinks.

    Returns:
        The state in float64: ``out [rows, heads, v_dim]``, ``lse [rows, heads]``.
    """
    starts = np.flatnonzero(np.diff(query_node, prepend=-1))
    runs = [slice(*bounds) for bounds in pairwise([*starts.tolist(), len(query_node)])]
    states = [
        _one_node(
            snapshot, int(query_node[run][0]), query_position[run], q[run], k_pages, v_pages, scale, variant, sinks
        )
        for run in runs
    ]
    heads, v_dim = q.shape[1], v_pages.shape[3]
    out = torch.cat([state.out for state in states]) if states else q.new_zeros(0, heads, v_dim).double()
    lse = torch.cat([state.lse for state in states]) if states else q.new_zeros(0, heads).double()
    return State(out, lse)


def visible_tokens(snapshot: TreeSnapshot, node: int, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pool slots and positions of what a query sees, from the root down."""
    path = [node]
    while snapshot.parent[path[-1]] >= 0:
        path.append(int(snapshot.parent[path[-1]]))
    counts = [int(snapshot.length[ancestor]) for ancestor in path]
    counts[0] = position + 1 - int(snapshot.start[node])
    nodes = np.concatenate([np.full(count, ancestor) for ancestor, count in zip(path[::-1], counts[::-1], strict=True)])
    offsets = np.concatenate([np.arange(count) for count in counts[::-1]])
    return snapshot.slots(nodes, offsets), snapshot.start[nodes].astype(np.int64) + offsets


def formats_attention(
    tree: StepTree,
    formats: Sequence[BSR],
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant = CAUSAL,
    sinks: Tensor | None = None,
) -> State:
    """Attention by the meaning of block-sparse rows, query by query.

    Arguments but ``tree`` and ``formats``, and the result, are as :func:`reference_attention` has them.
    """
    lists: list[list[tuple[int, int]]] = [[] for _ in range(tree.queries.num_rows)]
    for bsr in formats:
        limits = iter(bsr.limit.tolist())
        for row in range(len(bsr.kind)):
            tokens = [
                (int(node), offset)
                for node, begin, end in zip(
                    *(x[bsr.indptr[row] : bsr.indptr[row + 1]] for x in (bsr.node, bsr.begin, bsr.end)), strict=True
                )
                for offset in range(begin, min(end, int(tree.length[node])))
            ]
            for query in range(bsr.q_begin[row], bsr.q_end[row]):
                seen = tokens
                if bsr.kind[row] == MaskKind.OWN:
                    seen = [(n, at) for n, at in tokens if tree.snapshot.start[n] + at <= tree.positions[query]]
                elif bsr.kind[row] == MaskKind.LIMIT:
                    seen = tokens[: next(limits)]
                lists[query] += seen
    states = []
    for query, seen in enumerate(lists):
        node, offset = np.array(seen, dtype=np.int64).reshape(-1, 2).T
        slots, kv_positions = tree.snapshot.slots(node, offset), tree.snapshot.start[node] + offset
        where = torch.from_numpy(slots), torch.from_numpy(kv_positions.astype(np.int64))
        one, position = slice(query, query + 1), tree.positions[query : query + 1]
        states.append(_over(*where, position, q[one], k_pages, v_pages, scale, variant, sinks, causal=False))
    return State(*map(torch.cat, zip(*states, strict=True)))


def _one_node(
    snapshot: TreeSnapshot,
    node: int,
    positions: NDArray[np.integer],
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant,
    sinks: Tensor | None,
) -> State:
    """``q [rows, heads, head_dim]`` of one node against all the keys that the last of them sees."""
    slots, kv_positions = map(torch.from_numpy, visible_tokens(snapshot, node, int(positions.max())))
    return _over(slots, kv_positions, positions, q, k_pages, v_pages, scale, variant, sinks, causal=True)


def _over(
    slots: Tensor,
    kv_positions: Tensor,
    positions: NDArray[np.integer],
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant,
    sinks: Tensor | None,
    *,
    causal: bool,
) -> State:
    """``q [rows, heads, head_dim]`` against the keys in ``slots``; ``causal`` hides those after a query."""
    heads, page_size = q.shape[1], k_pages.shape[1]
    group = heads // k_pages.shape[2]
    k, v = (
        repeat(pages[slots // page_size, slots % page_size].double(), "len h dim -> len (h group) dim", group=group)
        for pages in (k_pages, v_pages)
    )
    score = scale * einsum(q.double(), k, "rows heads dim, len heads dim -> heads rows len")
    where = (
        torch.from_numpy(positions.astype(np.int64))[:, None],
        kv_positions[None, :],
        torch.arange(heads)[:, None, None],
    )
    if variant.score_mod is not None:
        score = variant.score_mod(score, *where)
    visible = (where[1] <= where[0]) | (not causal)
    if variant.mask_mod is not None:
        visible = visible & variant.mask_mod(*where)
    score = score.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    if variant.has_sinks:
        assert sinks is not None
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return State(einsum(weight, v, "heads rows len, len heads dim -> rows heads dim"), lse.T)
