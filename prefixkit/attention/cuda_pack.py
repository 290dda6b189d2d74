"""Plans made by the specification, packed for the kernels: so that any plan runs on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.checks import WORK, check_work
from prefixkit.attention.formats import BSR
from prefixkit.attention.gpu_cost import H200, WIDE_ROWS
from prefixkit.attention.gpu_plan import make_gpu_plan
from prefixkit.attention.torch_backend import NotCapturable

# Packed plans kept: a model uses one or two per step.
_KEPT = 4
_kept: list[tuple[tuple[object, ...], list[Tensor], list[Tensor]]] = []


def packed(
    rows: int,
    work: Sequence[Tensor],
    nodes: Sequence[Tensor],
    group: int,
    kv_heads: int,
    num_sms: int,
    wide_rows: int = WIDE_ROWS,
) -> Sequence[Tensor]:
    """``work`` as the kernels take it: itself, or packed from a plan's five tensors, once for each plan.

    Raises:
        BadShape, BadDtype, BadDevice: it is neither.
        NotCapturable: it has yet to be packed, in the capture of a CUDA graph.
    """
    if len(work) != len(WORK):
        return work
    # The tensors are kept, so that their ids are nobody else's.
    key = (rows, group, kv_heads, num_sms, wide_rows, *map(_identity, work))
    for known, _, result in _kept:
        if known == key:
            return result
    check_work(rows, work, nodes)
    if work[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotCapturable(
            "tree_attention: a plan's five tensors are packed on the host, which a CUDA graph cannot capture; pack them "
            "before with make_gpu_plan, or call the op once before the capture"
        )
    items, segment_indptr, segments, _, _ = (tensor.cpu().numpy() for tensor in work)
    all_heads = items[:, 4] <= 0  # with heads dealt apart, KV head 0 stands for its siblings
    formats = _formats(items[all_heads], segment_indptr[:-1][all_heads], np.diff(segment_indptr)[all_heads], segments)
    length = nodes[1].cpu().numpy()
    cost = replace(H200, sharing=replace(H200.sharing, tile_heads=wide_rows))
    plan = make_gpu_plan([formats], length, rows, group=group, kv_heads=kv_heads, num_sms=num_sms, cost=cost)
    result = [torch.from_numpy(array).to(work[0].device) for array in plan.arrays()]
    _kept.insert(0, (key, list(work), result))
    del _kept[_KEPT:]
    return result


def _identity(tensor: Tensor) -> tuple[int, int]:
    # Tensors made under inference_mode count no changes; a plan in them must not be written again.
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _formats(items: np.ndarray, begin: np.ndarray, count: np.ndarray, segments: np.ndarray) -> BSR:
    """A plan's items as block-sparse rows, in the order of their first segments."""
    order = np.lexsort((items[:, 0], segments[begin, 1], segments[begin, 0])) if len(items) else np.zeros(0, dtype=int)
    items, begin, count = items[order], begin[order], count[order]
    indptr = np.concatenate(([0], np.cumsum(count)))
    which = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - begin, count)
    node, low, high = segments[which].T
    return BSR(
        tile_rows=WIDE_ROWS,
        q_begin=items[:, 0],
        q_end=items[:, 1],
        causal=items[:, 2] != 0,
        indptr=indptr.astype(np.int32),
        node=node,
        begin=low,
        end=high,
    )
