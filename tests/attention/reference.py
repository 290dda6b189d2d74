"""Dense float64 attention over a tree: the specification that everything faster is tested against.

A query at node ``n`` and position ``p`` attends to every token of ``n``'s proper ancestors, and to ``n``'s tokens at
positions up to ``p``.  Query head ``h`` reads KV head ``h // (heads // kv_heads)``.
"""

from __future__ import annotations

import numpy as np
import torch
from einops import einsum, repeat
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.variants import CAUSAL, Variant
from prefixkit.backends.torch.merge import State
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
) -> State:
    """Attention of any queries over the tree, one query at a time.

    Args:
        snapshot: The tree.
        query_node: ``[rows]`` the node that each query sits in.
        query_position: ``[rows]`` its position in the sequence.
        q: ``[rows, heads, head_dim]`` any float dtype.
        k_pages, v_pages: ``[pages, page_size, kv_heads, head_dim]`` any float dtype.
        scale: Factor on ``q . k``.
        variant: What else happens to the scores.

    Returns:
        The state in float64: ``out [rows, heads, head_dim]``, ``lse [rows, heads]``.
    """
    states = [
        _one_query(
            *visible_tokens(snapshot, int(node), int(position)), int(position), row, k_pages, v_pages, scale, variant
        )
        for node, position, row in zip(query_node, query_position, q, strict=True)
    ]
    rows, heads, head_dim = q.shape
    out = torch.stack([state.out for state in states]) if states else q.new_zeros(0, heads, head_dim).double()
    lse = torch.stack([state.lse for state in states]) if states else q.new_zeros(0, heads).double()
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


def _one_query(
    slots: NDArray[np.int64],
    kv_positions: NDArray[np.int64],
    q_position: int,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant,
) -> State:
    """``q [heads, head_dim]`` against all its keys at once."""
    heads = len(q)
    group = heads // k_pages.shape[2]
    page, offset = torch.from_numpy(slots // k_pages.shape[1]), torch.from_numpy(slots % k_pages.shape[1])
    k, v = (
        repeat(pages[page, offset].double(), "len kv_heads dim -> len (kv_heads group) dim", group=group)
        for pages in (k_pages, v_pages)
    )
    score = scale * einsum(q.double(), k, "heads dim, len heads dim -> heads len")[:, None]  # [heads, 1 row, len]
    where = (
        torch.full((1, 1), q_position),
        torch.from_numpy(kv_positions)[None, :],
        torch.arange(heads)[:, None, None],
    )
    if variant.score_mod is not None:
        score = variant.score_mod(score, *where)
    if variant.mask_mod is not None:
        score = score.masked_fill(~variant.mask_mod(*where), -torch.inf)
    lse = torch.logsumexp(score, dim=-1)[:, 0]
    if variant.sinks is not None:
        lse = torch.logaddexp(lse, variant.sinks.double())
    weight = torch.exp(score[:, 0] - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
    return State(einsum(weight, v, "heads len, len heads dim -> heads dim"), lse)
