"""``tree_attention`` by our kernel: one launch for a layer, whatever the tree."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixkit.attention.queries import UNNUMBERED, UnnumberedSequences
from prefixkit.attention.variants import CAUSAL, Variant, lookup
from prefixkit.backends.cuda.checked_mode import CheckedPlan, check_packed_numbers
from prefixkit.backends.cuda.device_planner import (
    NO_FLOAT32,
    PLAN_TENSORS,
    WORK_TENSORS,
    plan_in_torch,
    say_plain_torch,
)
from prefixkit.backends.cuda.grid_barrier import BarrierCounters
from prefixkit.backends.cuda.kernels import (
    Kernel,
    attention_unit,
    expanded_kernel_for,
    kernel_for,
    latent_groups,
    latent_kernel_for,
)
from prefixkit.backends.cuda.layouts import ATTENTION as ATTENTION_LAYOUT
from prefixkit.backends.cuda.layouts import Maps
from prefixkit.backends.cuda.variant_header import VariantWords, words_on_device
from prefixkit.backends.torch import run_program
from prefixkit.backends.torch.latent_attention import latent_attention as plain_latents
from prefixkit.checking import checked
from prefixkit.cuda import jit
from prefixkit.cuda.launch import LaunchCache, launch, signature_of
from prefixkit.cuda.nvrtc import arch_for, supported_archs
from prefixkit.cuda.tensor_maps import TensorMaps, cached_tensor_maps, holds_groups
from prefixkit.ops.arguments import BadShape, check_attention, check_latents, check_packed
from prefixkit.ops.backend import NotCapturable
from prefixkit.threads import once
from prefixkit.torch_private import raw_stream, stream_captures

log = logging.getLogger("prefixkit")

LOG2E = math.log2(math.e)
# Without tensor maps a row's address is a 32-bit number of 16 bytes.
MOST_BYTES = 2**36


class UnsupportedHeads(BadShape):
    """The kernels have no instantiation for a head size."""


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A launch without its arguments' addresses.  ``function`` is None where plain torch serves."""

    function: jit.Function | None
    v_dim: int = 0
    blocks: int = 0
    threads: int = 0
    shared: int = 0
    numbers: tuple[int, ...] = ()
    words: VariantWords | None = None
    reads_sequence: bool = False
    window: int = 0
    tma_groups: bool = False
    maps: Maps = Maps.NONE
    pages_signature: tuple[int, ...] = ()


class TreeAttention:
    """The op, and what its calls reuse: prepared launches, tensor maps, and the counters of grid barriers."""

    def __init__(self) -> None:
        # By :func:`launch_signature`.
        self.launches: LaunchCache[tuple[_Prepared, BarrierCounters]] = LaunchCache()
        # Of layers, those of pools that are gone included: 3 MiB of maps at most.
        self._maps: LaunchCache[TensorMaps] = LaunchCache()
        self._barriers, self._plan = once(BarrierCounters), CheckedPlan()

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        q_positions: Tensor,
        plan: Sequence[Tensor],
        scale: float,
        variant: str,
        sinks: Tensor | None = None,
        rotary_pages: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``tree_attention`` by our kernel, or in plain torch where its planner has planned for that.

        A plan for the kernels runs in plain torch where this layer's variant was not traced, or pages are float32.

        Raises:
            BadShape, BadDtype, BadDevice, UnsupportedHeads, UnknownVariant: before anything is launched.
            CudaError: the launch failed.
        """
        if len(plan) == 1:
            return run_program.tree_attention(
                q, k_pages, v_pages, q_positions, plan, scale, variant, sinks, rotary_pages
            )
        return self._run(q, k_pages, v_pages, rotary_pages, q_positions, plan, scale, variant, sinks)

    def latents(
        self,
        q: Tensor,
        latent_pages: Tensor,
        rotary_pages: Tensor,
        q_positions: Tensor,
        plan: Sequence[Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """``latent_attention``, by our kernel or in plain torch, as :meth:`__call__`."""
        if len(plan) == 1:
            return plain_latents(q, latent_pages, rotary_pages, q_positions, plan, scale)
        values = latent_pages
        return self._run(q, latent_pages, values, rotary_pages, q_positions, plan, scale, CAUSAL.name, None, True)

    def _run(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        rotary_pages: Tensor | None,
        q_positions: Tensor,
        plan: Sequence[Tensor],
        scale: float,
        variant: str,
        sinks: Tensor | None,
        latent: bool = False,
    ) -> tuple[Tensor, Tensor]:
        signature = latent, launch_signature(variant, q, k_pages, v_pages, sinks, rotary_pages)
        known = self.launches.get(signature)
        if known is None:
            prepare = _prepare_latents if latent else _prepare
            prepared = prepare(q, k_pages, v_pages, rotary_pages, q_positions, variant, sinks)
            known = self.launches.store(signature, (prepared, self._barriers(k_pages.device)))
        prepared, barriers = known
        function, uses_tma, v_dim = prepared.function, prepared.maps is not Maps.NONE, prepared.v_dim
        work, nodes = plan[:WORK_TENSORS], plan[WORK_TENSORS:PLAN_TENSORS]
        if function is None:
            check_packed(q.shape[0], work, nodes)
            bound = plan_in_torch(plan)
            if bound is None:
                raise NotCapturable(
                    f"tree_attention: a plan in a CUDA graph's tensors is for the kernels only, which serve neither "
                    f"{q.dtype} nor a variant that was not traced; run eagerly"
                )
            return run_program.tree_attention(
                q, k_pages, v_pages, q_positions, bound, scale, variant, sinks, rotary_pages
            )
        words, sequences = prepared.words, 0
        if words is not None:
            words.refresh()
            sequences = _sequences(plan, q) if prepared.reads_sequence else 0
        if not q.is_contiguous() or q.data_ptr() & 15:
            q = q.clone(memory_format=torch.contiguous_format)
        if (k_pages.data_ptr() | v_pages.data_ptr() | (0 if rotary_pages is None else rotary_pages.data_ptr())) & 15:
            raise BadShape("tree_attention: pages must begin at multiples of 16 bytes; make them with KVPool")
        maps: TensorMaps = ()
        if uses_tma:
            maps = cached_tensor_maps(self._maps, k_pages, v_pages, prepared.pages_signature, rotary_pages)
        addresses = self._plan.check(q, q_positions, work, nodes)
        if checked():
            check_packed_numbers(q.shape[0], k_pages.shape[:2], work, nodes)
        rows, heads, _ = q.shape
        device = function.device
        stream, capturing = raw_stream(device), stream_captures()
        counter = barriers.address(("graph", _capture_id(stream)) if capturing else stream, capturing)
        out = q.new_empty((rows, heads, v_dim))
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        partials = work[5].shape[0] * heads  # every partial row merges once
        workspace = partials_workspace(partials * (v_dim + 1), q.device)  # freed on return
        partial_out = workspace.data_ptr()
        values: tuple[int | float | bytes, ...] = (
            *maps,
            *map(Tensor.data_ptr, (q, k_pages, v_pages, q_positions, out, lse)),
            *(partial_out, partial_out + 4 * partials * v_dim, counter),
            *addresses,
            *prepared.numbers,
            *(
                scale,
                scale * LOG2E,
                0 if words is None else words.tensor.data_ptr(),
                sequences,
                0 if sinks is None else sinks.data_ptr(),
                prepared.window,
            ),
            *(work[1].shape[0], work[2].shape[0], prepared.tma_groups, rows),
        )
        describe, layout = _describe(q, k_pages, work, nodes, variant), ATTENTION_LAYOUT[prepared.maps]
        grid, threads, shared = (prepared.blocks, 1, 1), prepared.threads, prepared.shared
        launch(function, layout, values, grid, threads, shared, describe, cooperative=True, pdl=uses_tma)
        return out, lse


def _sequences(plan: Sequence[Tensor], q: Tensor) -> int:
    """Where the numbers of the queries' sequences lie, of a plan that has them."""
    numbers = plan[PLAN_TENSORS] if len(plan) > PLAN_TENSORS else None
    if numbers is None or numbers.dtype != torch.int64 or numbers.ndim != 1 or len(numbers) < q.shape[0]:
        raise UnnumberedSequences("tree_attention: " + UNNUMBERED)
    return numbers.data_ptr()


def launch_signature(
    key: str, q: Tensor, k_pages: Tensor, v_pages: Tensor, sinks: Tensor | None, rotary_pages: Tensor | None = None
) -> Hashable:
    """The signature that launches are cached by: all but the number of queries, which differs from step to step."""
    of_pages = signature_of(k_pages), signature_of(v_pages)
    others = (None if tensor is None else signature_of(tensor) for tensor in (sinks, rotary_pages))
    return key, q.shape[1:], q.dtype, q.device, of_pages, *others


def _prepare(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rotary_pages: Tensor | None,
    q_positions: Tensor,
    key: str,
    sinks: Tensor | None,
) -> _Prepared:
    """Check what differs from layer to layer, and find the kernel."""
    variant = lookup(key)
    check_attention(q, k_pages, v_pages, q_positions, variant, sinks, rotary_pages)
    device = k_pages.device.index
    arch = arch_for(torch.cuda.get_device_capability(device), supported_archs())
    if q.dtype == torch.float32:
        say_plain_torch(NO_FLOAT32)
        return _Prepared(None)
    if not variant.traced:
        say_plain_torch(f"variant {variant.name!r} is not traced")
        return _Prepared(None)
    heads, head_dim = q.shape[1:]
    gqa_group = heads // k_pages.shape[2]
    v_dim = v_pages.shape[3]
    if rotary_pages is None:
        kernel = kernel_for(arch, head_dim, gqa_group, v_dim)
    else:
        kernel = expanded_kernel_for(arch, k_pages.shape[3], rotary_pages.shape[3], v_dim) if gqa_group == 1 else None
        _check_strides("tree_attention", rotary_pages)
    if kernel is None:
        raise UnsupportedHeads(
            f"tree_attention: the kernels serve head sizes that are multiples of 16 up to 256, the same for K and V, "
            f"and on Hopper 192 with 128; got {head_dim} and {v_dim}"
            f"{'' if rotary_pages is None else f', of which {rotary_pages.shape[3]} lie apart'}; plan the step with "
            "the backend's planner_for, which leaves it to plain torch"
        )
    _check_strides("tree_attention", k_pages, v_pages)
    if v_pages.shape == k_pages.shape and v_pages.stride() != k_pages.stride():
        raise BadShape(
            f"tree_attention: k_pages and v_pages must have the same strides, got {k_pages.stride()} and "
            f"{v_pages.stride()}; make them with KVPool"
        )
    page = k_pages.stride(0)
    if not kernel.uses_tma and k_pages.shape[0] * page * k_pages.element_size() > MOST_BYTES:
        raise BadShape(
            f"tree_attention: this kernel reaches {MOST_BYTES >> 30} GiB of keys, from page to page {page} elements, "
            f"got {k_pages.shape[0]} pages; make a smaller pool, or one tensor per layer"
        )
    return _prepared(kernel, q, (k_pages, v_pages, rotary_pages), k_pages.shape[2], v_dim, variant, key)


def _prepare_latents(
    q: Tensor,
    latent_pages: Tensor,
    v_pages: Tensor,
    rotary_pages: Tensor | None,
    q_positions: Tensor,
    key: str,
    sinks: Tensor | None,
) -> _Prepared:
    """The same for latents."""
    assert rotary_pages is not None, "the op has them"
    check_latents(q, latent_pages, rotary_pages, q_positions)
    latent, rotary = latent_pages.shape[3], rotary_pages.shape[3]
    arch = arch_for(torch.cuda.get_device_capability(latent_pages.device.index), supported_archs())
    kernel, groups = latent_kernel_for(arch, latent, rotary), latent_groups(q.shape[1])
    if kernel is None or groups is None or q.dtype == torch.float32:
        raise UnsupportedHeads(
            f"latent_attention: on Hopper the kernel serves latents of 256 or 512 in 16 bits, rotary keys of up to 64, "
            f"and heads that divide into groups of up to 64; got {latent}, {rotary}, {q.shape[1]} heads and {q.dtype}; "
            "plan the step with the backend's planner for latents, which leaves it to plain torch"
        )
    _check_strides("latent_attention", latent_pages, rotary_pages)
    return _prepared(kernel, q, (latent_pages, v_pages, rotary_pages), groups, latent, lookup(key), key)


def _check_strides(op: str, *pages: Tensor) -> None:
    """Raise BadShape unless rows of pages begin at multiples of 16 bytes."""
    for each in pages:
        if any(stride % 8 for stride in each.stride()[:3]):
            raise BadShape(f"{op}: strides of pages must be multiples of 8, got {each.stride()}; make them with KVPool")


def _prepared(
    kernel: Kernel,
    q: Tensor,
    pages: tuple[Tensor, Tensor, Tensor | None],
    kv_heads: int,
    v_dim: int,
    variant: Variant,
    key: str,
) -> _Prepared:
    """What is launched for pages that a kernel serves."""
    k_pages = pages[0]
    half, device, (heads, head_dim) = q.dtype == torch.float16, k_pages.device.index, q.shape[1:]
    function = jit.load(attention_unit(kernel, head_dim, half, variant, v_dim), device)[kernel.name]
    blocks = kernel.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    shared = function.max_shared if kernel.shared is None else kernel.shared
    page, slot, head, _ = k_pages.stride()
    return _Prepared(
        ATTENTION_LAYOUT[kernel.maps].check(function),
        v_dim,
        blocks,
        kernel.threads,
        shared,
        numbers=(page, head, slot, heads, kv_heads, k_pages.shape[1]),
        words=words_on_device(variant, q.device) if variant.mods else None,
        reads_sequence=variant.reads("b"),
        window=variant.window or 0,
        tma_groups=holds_groups(k_pages.shape[1]),
        maps=kernel.maps,
        pages_signature=(*(n for each in pages if each is not None for n in (*each.shape, *each.stride())), half),
    )


def partials_workspace(elements: int, device: torch.device) -> Tensor:
    """Float32 workspace for partial states, of torch's allocator: a call's own, which the next on its stream may reuse.

    While a graph is captured it lies in the graph's memory, and so lives as long as the graph.  It has up to an eighth
    more than ``elements``, but no more than the next power of two: trees grow little by little, and torch should find
    the block of the last call.
    """
    step = 1 << max(elements.bit_length() - 4, 0)
    return torch.empty(-(-elements // step) * step, dtype=torch.float32, device=device)


def _capture_id(stream: int) -> int:
    from cuda.bindings import driver

    return int(driver.cuStreamGetCaptureInfo(stream)[2])


def _describe(
    q: Tensor, k_pages: Tensor, work: Sequence[Tensor], nodes: Sequence[Tensor], key: str
) -> Callable[[], str]:
    def describe() -> str:
        pages = f"pages {list(k_pages.shape)} strides {list(k_pages.stride())}"
        plan = f"tile {list(work[1].shape)}, decode {list(work[2].shape)}, {len(nodes[0])} nodes"
        if not torch.cuda.is_current_stream_capturing():
            try:
                plan += f", counts {work[0].tolist()}"
            except Exception as error:  # after a failed kernel nothing can be read
                plan += f", counts cannot be read ({type(error).__name__})"
        return f"tree_attention on {q.device}: q {list(q.shape)} {q.dtype}, {pages}, variant {key!r}, plan: {plan}"

    return describe
