"""Float64 attention by the meaning of formats, query by query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.bsr import BSR, OPEN, MaskKind
from prefixkit.attention.paths.runs import with_runs
from prefixkit.attention.queries import StepTree
from prefixkit.attention.reference import Exact, Rows, attention_over
from prefixkit.attention.variants import CAUSAL, Variant
from prefixkit.attention.variants.variant import Mod


def formats_attention(
    tree: StepTree,
    formats: Sequence[BSR],
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant = CAUSAL,
    sinks: Tensor | None = None,
) -> Exact:
    """Attention by the meaning of block-sparse rows, query by query.

    Arguments but ``tree`` and ``formats``, and the result, are as :func:`reference_attention` has them.
    """
    variant = _without_causality(variant)
    lists: list[list[tuple[int, int]]] = [[] for _ in range(tree.queries.num_rows)]
    for bsr in formats:
        limits = iter(bsr.limit.tolist())
        for row in range(len(bsr.kind)):
            tokens = tokens_of(tree, bsr, row)
            for query in range(bsr.q_begin[row], bsr.q_end[row]):
                last = {MaskKind.ALL: OPEN, MaskKind.OWN: tree.positions[query]}.get(bsr.kind[row])
                last = next(limits) if last is None else last
                lists[query] += [(position, slot) for position, slot in tokens if position <= last]
    states = []
    for query, seen in enumerate(lists):
        kv_positions, slots = np.array(seen, dtype=np.int64).reshape(-1, 2).T.copy()
        where = torch.from_numpy(slots), torch.from_numpy(kv_positions), False
        one = slice(query, query + 1)
        rows = Rows(torch.from_numpy(tree.sequences[one]), torch.from_numpy(tree.positions[one]))
        states.append(attention_over(*where, rows, q[one], k_pages, v_pages, scale, variant, sinks))
    return Exact(*map(torch.cat, zip(*states, strict=True)))


def tokens_of(tree: StepTree, bsr: BSR, row: int) -> list[tuple[int, int]]:
    """Position and slot of each token of a row's list, in its order."""
    start, length, page_indptr, pages, first_slot = with_runs(tree.arrays(), bsr.runs)
    part, size, tokens = slice(*bsr.indptr[row : row + 2]), tree.snapshot.page_size, []
    for node, begin, end in zip(bsr.node[part], bsr.begin[part], bsr.end[part], strict=True):
        offset = np.arange(begin, min(end, length[node]))
        within = first_slot[node] + offset
        slots = pages[page_indptr[node] + within // size].astype(np.int64) * size + within % size
        tokens += zip((start[node] + offset).tolist(), slots.tolist(), strict=True)
    return tokens


def _without_causality(variant: Variant) -> Variant:
    """With masks as attention evaluates them where formats say which keys come after a query."""
    masks = tuple(replace(mod, function=_by_name(mod)) for mod in variant.mask_mods)
    return replace(variant, mask_mods=masks)


def _by_name(mod: Mod) -> Callable[..., Tensor]:
    return lambda b, h, q_idx, kv_idx: mod(b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
