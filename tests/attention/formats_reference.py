"""Float64 attention by the meaning of formats, query by query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.bsr import BSR, MaskKind
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
        where = torch.from_numpy(slots), torch.from_numpy(kv_positions.astype(np.int64)), False
        one = slice(query, query + 1)
        rows = Rows(torch.from_numpy(tree.sequences[one]), torch.from_numpy(tree.positions[one]))
        states.append(attention_over(*where, rows, q[one], k_pages, v_pages, scale, variant, sinks))
    return Exact(*map(torch.cat, zip(*states, strict=True)))


def _without_causality(variant: Variant) -> Variant:
    """With masks as attention evaluates them where formats say which keys come after a query."""
    masks = tuple(replace(mod, function=_by_name(mod)) for mod in variant.mask_mods)
    return replace(variant, mask_mods=masks)


def _by_name(mod: Mod) -> Callable[..., Tensor]:
    return lambda b, h, q_idx, kv_idx: mod(b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
