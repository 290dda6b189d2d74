"""``tree_attention`` by our kernel: one launch for a layer, whatever the tree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixkit.attention import cuda_variants, jit, torch_backend
from prefixkit.attention.checks import BadShape, check_attention, check_packed
from prefixkit.attention.cuda_checks import CudaError, check_packed_numbers
from prefixkit.attention.cuda_launch import Layout, checked, launch
from prefixkit.attention.cuda_pack import packed
from prefixkit.attention.cuda_units import ATTENTION, HEAD_DIMS, attention_unit
from prefixkit.attention.nvrtc import arch_for, supported_archs
from prefixkit.attention.variants import lookup

log = logging.getLogger("prefixkit")

# Pointers as struct Attention lists them; strides of pages, heads, slots; heads, KV heads, page size; scale.
_LAYOUT = Layout("P" * 21 + "qqq" + "iii" + "f")
_BARE = Layout("P" * 20 + "qqq" + "iii" + "f")
# Counters at which the blocks of a launch meet: one per stream, and one per captured graph.
_COUNTERS = 4096
_MEMO_SIZE = 4096


class UnsupportedHeads(BadShape):
    """The kernels have no instantiation for a head size."""


@dataclass(frozen=True, eq=False)
class _Ready:
    """A launch but for its pointers; ``function`` is None where plain torch serves."""

    function: jit.Function | None
    blocks: int
    shared: int
    group: int = 1
    numbers: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    layout: Layout = _LAYOUT


_memo: dict[object, _Ready] = {}
_checked_ids: tuple[int, ...] = ()
_checked_tensors: list[Tensor] = []  # keeps them, so that their ids are nobody else's
_counters: dict[int, tuple[Tensor, dict[object, int]]] = {}
_said: set[str] = set()


def tree_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_positions: Tensor,
    work: Sequence[Tensor],
    nodes: Sequence[Tensor],
    scale: float,
    key: str,
) -> tuple[Tensor, Tensor]:
    """``tree_attention``; ``work`` as ``gpu_plan`` packs it, or a plan's own five tensors, which are packed here, once.

    Raises:
        BadShape, BadDtype, BadDevice, UnsupportedHeads, UnknownVariant: before anything is launched.
        CudaError: the launch failed.
    """
    signature = (q.shape, q.stride(), q.dtype, k_pages.shape, k_pages.stride(), v_pages.stride(), k_pages.device, key)
    ready = _memo.get(signature)
    if ready is None:
        ready = _prepare(q, k_pages, v_pages, q_positions, key)
        if len(_memo) >= _MEMO_SIZE:
            _memo.clear()
        _memo[signature] = ready
    if ready.function is None:
        return torch_backend.tree_attention(q, k_pages, v_pages, q_positions, work, nodes, scale, key)
    if not q.is_contiguous() or q.data_ptr() & 15:
        q = q.clone(memory_format=torch.contiguous_format)
    work = packed(q.shape[0], work, nodes, ready.group, k_pages.shape[2], ready.blocks)
    _check_plan(q_positions, work, nodes)
    if checked():
        check_packed_numbers(q.shape[0], k_pages.shape[:2], work, nodes)
    rows, heads, head_dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    partials = work[5].shape[0]  # every partial row merges once
    scratch = torch.empty(partials * heads * (head_dim + 1) or 1, dtype=torch.float32, device=q.device)
    pointers = (
        q.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        q_positions.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        scratch.data_ptr(),
        scratch.data_ptr() + 4 * partials * heads * head_dim,
        _counter(ready.function.device),
        *[tensor.data_ptr() for tensor in work],
        *[tensor.data_ptr() for tensor in nodes],
        *ready.parameters,
    )
    launch(
        ready.function,
        ready.layout,
        (*pointers, *ready.numbers, scale),
        (ready.blocks, 1, 1),
        ready.function.max_threads,
        ready.shared,
        _say(q, k_pages, work, nodes, key),
        together=True,
    )
    return out, lse


def _prepare(q: Tensor, k_pages: Tensor, v_pages: Tensor, q_positions: Tensor, key: str) -> _Ready:
    """Check what differs from layer to layer, and find the kernel."""
    check_attention(q, k_pages, v_pages, q_positions)
    variant = lookup(key)
    device = k_pages.device.index
    arch = arch_for(torch.cuda.get_device_capability(device), supported_archs())
    if q.dtype == torch.float32:
        return _by_torch("float32 has no kernel")
    if variant.bodies is None:
        return _by_torch(f"variant {variant.name!r} is Python only (its `bodies` are not set)")
    if arch not in HEAD_DIMS:
        return _by_torch(f"there is no kernel for {arch}")
    served = HEAD_DIMS[arch]
    heads, head_dim = q.shape[1:]
    if head_dim not in served:
        raise UnsupportedHeads(
            f"tree_attention: the kernels for {arch} serve head sizes {', '.join(map(str, served))}, got {head_dim}; set "
            f"PREFIXKIT_BACKEND=torch for plain torch"
        )
    page, slot, head, _ = k_pages.stride()
    if v_pages.stride() != k_pages.stride() or page % 8 or slot % 8 or head % 8:
        raise BadShape(
            f"tree_attention: k_pages and v_pages must have the same strides, multiples of 8, got {k_pages.stride()} and "
            f"{v_pages.stride()}; make them with KVPool"
        )
    if (k_pages.data_ptr() | v_pages.data_ptr()) & 15:
        raise BadShape("tree_attention: k_pages and v_pages must begin at multiples of 16 bytes; make them with KVPool")
    function = jit.load(attention_unit(arch, head_dim, q.dtype == torch.float16, variant), device)[ATTENTION]
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    numbers = (page, head, slot, heads, k_pages.shape[2], k_pages.shape[1])
    group = heads // k_pages.shape[2]
    parameters: tuple[int, ...] = (cuda_variants.on_device(key, heads, q.device).data_ptr(),)
    layout = _LAYOUT
    if function.parameter_bytes == _BARE.packer.size:
        layout, parameters = _BARE, ()
    layout.check(function)
    return _Ready(function, blocks, function.max_shared, group, numbers, parameters, layout)


def _by_torch(why: str) -> _Ready:
    if why not in _said:
        _said.add(why)
        log.warning("tree_attention runs in plain torch: %s", why)
    return _Ready(None, 0, 0)


def _check_plan(q_positions: Tensor, work: Sequence[Tensor], nodes: Sequence[Tensor]) -> None:
    """Check what is the same in all layers, once: the tensors of the last call are known by their identity."""
    global _checked_ids, _checked_tensors
    tensors = [q_positions, *work, *nodes]
    ids = tuple(map(id, tensors))
    if ids != _checked_ids:
        check_packed(q_positions.shape[0], work, nodes)
        _checked_ids, _checked_tensors = ids, tensors


def _counter(device: int) -> int:
    """Address of a counter that no other launch in flight uses: launches of one stream, or one graph, follow each other."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    capturing = torch.cuda.is_current_stream_capturing()
    if device not in _counters:
        if capturing:
            raise CudaError(
                "tree_attention: call it once before capturing it in a CUDA graph, so that it can set up memory"
            )
        _counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=torch.device("cuda", device)), {}
    memory, taken = _counters[device]
    key: object = ("graph", _capture_id(stream)) if capturing else stream
    number = taken.get(key)
    if number is None:
        number = taken[key] = len(taken) % _COUNTERS
    return memory.data_ptr() + 4 * number


def _capture_id(stream: int) -> int:
    from cuda.bindings import driver

    return int(driver.cuStreamGetCaptureInfo(stream)[2])


def _say(q: Tensor, k_pages: Tensor, work: Sequence[Tensor], nodes: Sequence[Tensor], key: str) -> Callable[[], str]:
    def say() -> str:
        pages = f"pages {list(k_pages.shape)} strides {list(k_pages.stride())}"
        plan = f"wide {list(work[1].shape)}, narrow {list(work[2].shape)}, {len(nodes[0])} nodes"
        if not torch.cuda.is_current_stream_capturing():
            try:
                plan += f", counts {work[0].tolist()}"
            except Exception as error:  # after a failed kernel nothing can be read
                plan += f", counts cannot be read ({type(error).__name__})"
        return f"tree_attention on {q.device}: q {list(q.shape)} {q.dtype}, {pages}, variant {key!r}, plan: {plan}"

    return say
