"""``rotary_append`` by our kernel: one launch rotates queries and keys, and writes keys and values to pages."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable

import torch
from torch import Tensor

from prefixkit.backends.cuda import append as cuda_ops
from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.units import ROTARY, rotary_name
from prefixkit.checking import checked
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.ops.checks import check_append_slots, check_rotary
from prefixkit.ops.rotary import rotate

log = logging.getLogger("prefixkit")

_THREADS = 256
_VECTOR = 16
_MEMO_SIZE = 4096
# None: forms that the kernel does not take.
_memo: dict[Hashable, tuple[jit.Function, tuple[int, ...], tuple[int, int, int], bool] | None] = {}


def rotary_append(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Tensor:
    """``rotary_append``."""
    tensors = (q, key, value, cos, sin, k_pages, v_pages, slots)
    pointers = [tensor.data_ptr() for tensor in tensors]
    aligned = functools.reduce(int.__or__, pointers[:7]) % _VECTOR == 0
    signature = (aligned, *((x.shape, x.stride(), x.dtype, x.device) for x in tensors))
    if signature not in _memo:
        check_rotary(*tensors)
        if len(_memo) >= _MEMO_SIZE:
            _memo.clear()
        _memo[signature] = _prepare(*tensors) if aligned else None
        if _memo[signature] is None:
            log.info("rotary_append on %s runs as torch and kv_append: not all of it lies at 16 bytes", q.device)
    ready = _memo[signature]
    if ready is None:
        cuda_ops.kv_append(rotate(key, cos, sin), value, k_pages, v_pages, slots)
        return rotate(q, cos, sin)
    function, constants, grid, follows = ready
    if checked():
        check_append_slots("rotary_append", slots, k_pages)
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    values = (*pointers[:5], rotated.data_ptr(), *pointers[5:], *constants)
    launch(
        function,
        layouts.ROTARY,
        values,
        grid,
        _THREADS,
        0,
        cuda_ops.say("rotary_append", q, key, k_pages),
        follows=follows,
    )
    return rotated


def _prepare(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> tuple[jit.Function, tuple[int, ...], tuple[int, int, int], bool] | None:
    """The launch but for its pointers; None where vectors of 16 bytes do not fit."""
    size, (tokens, heads, head_dim), kv_heads = q.element_size(), q.shape, key.shape[1]
    num_pages, page_size = k_pages.shape[:2]
    rows = [stride for x in (q, key, value) for stride in x.stride()[:2]]
    strides = [*rows, cos.stride(0), sin.stride(0), *k_pages.stride()[:3], *v_pages.stride()[:3]]
    # An axis of one element has no step.
    lengths = [tokens, heads, *[tokens, kv_heads] * 2, tokens, tokens, *[num_pages, page_size, kv_heads] * 2]
    strides = [stride * size if length > 1 else 0 for stride, length in zip(strides, lengths, strict=True)]
    half = head_dim * size // 2
    adjacent = all(x.stride(-1) == 1 for x in (q, key, value, cos, sin)) and slots.is_contiguous()
    threads = tokens * (heads + kv_heads) * (half // _VECTOR)
    if not adjacent or any(stride % _VECTOR for stride in (half, *strides)) or threads >= 2**32 - _THREADS:
        return None
    device = k_pages.device.index
    function = jit.load(ROTARY, device)[rotary_name(str(q.dtype).removeprefix("torch."))]
    layouts.ROTARY.check(function)
    vectors = (stride // _VECTOR for stride in strides)
    constants = (*vectors, num_pages * page_size, tokens, heads, kv_heads, half // _VECTOR, page_size)
    follows = torch.cuda.get_device_capability(device) >= (9, 0)
    return function, constants, (-(-threads // _THREADS), 1, 1), follows
