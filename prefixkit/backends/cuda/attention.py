"""``tree_attention`` by our kernel: one launch for a layer, whatever the tree."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prefixkit.attention.variants import CAUSAL, lookup
from prefixkit.backends.cuda.checked_mode import CheckedPlan, check_packed_numbers
from prefixkit.backends.cuda.device_planner import (
    PLAN_TENSORS,
    WORK_TENSORS,
    plan_in_torch,
)
from prefixkit.backends.cuda.grid_barrier import BarrierCounters
from prefixkit.backends.cuda.layouts import ATTENTION as ATTENTION_LAYOUT
from prefixkit.backends.cuda.layouts import Maps
from prefixkit.backends.cuda.prepared_attention import (
    Prepared,
    check_begins,
    launch_signature,
    prepare_attention,
    prepare_latents,
)
from prefixkit.backends.cuda.variants.block_classes import classes_in, reach_in, sequence_numbers
from prefixkit.backends.cuda.variants.variant_words import words_on_device
from prefixkit.backends.torch import run_program
from prefixkit.backends.torch.latent_attention import latent_attention as plain_latents
from prefixkit.checking import checked
from prefixkit.cuda.launch import LaunchCache, launch
from prefixkit.cuda.tensor_maps import TensorMaps, cached_tensor_maps
from prefixkit.ops.arguments import check_packed
from prefixkit.ops.backend import NotCapturable
from prefixkit.threads import once
from prefixkit.torch_private import raw_stream, stream_captures

log = logging.getLogger("prefixkit")

LOG2E = math.log2(math.e)


class TreeAttention:
    """The op, and the state that its calls reuse: prepared launches, tensor maps, and counters of grid barriers."""

    def __init__(self) -> None:
        # By :func:`launch_signature`.
        self.launches: LaunchCache[tuple[Prepared, BarrierCounters]] = LaunchCache()
        # The maps of layers, perhaps of pools that were freed: 3 MiB at most.
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
        """``tree_attention`` by our kernel, or in plain torch if the plan is for that.

        A plan for the kernels runs in plain torch if this layer's variant was not traced, or pages are float32.

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
        """``latent_attention``, by our kernel or in plain torch, likewise."""
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
            prepare = prepare_latents if latent else prepare_attention
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
        of_variant = (0, 0, 0, 0, 0, 0)
        if prepared.modified:
            words = words_on_device(lookup(variant), q.device)
            words.refresh()
            sequences = sequence_numbers(plan, q.shape[0]) if prepared.reads_sequence else 0
            reach = reach_in(plan, q.shape[0]) if prepared.looks_ahead else 0
            of_variant = words.tensor.data_ptr(), sequences, reach, *classes_in(plan), 0
        if not q.is_contiguous() or q.data_ptr() & 15:
            q = q.clone(memory_format=torch.contiguous_format)
        if (k_pages.data_ptr() | v_pages.data_ptr() | (0 if rotary_pages is None else rotary_pages.data_ptr())) & 15:
            check_begins("tree_attention", k_pages, v_pages, *([] if rotary_pages is None else [rotary_pages]))
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
        out = q.new_empty((rows, heads, v_dim), dtype=prepared.out_dtype)
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        partials = work[5].shape[0] * heads  # every partial row merges once
        # The merge reads log-sum-exps by fours.  The workspace is freed on return.
        workspace = partials_workspace(partials * (v_dim + 1) + 3, q.device)
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
                *of_variant,
                0 if sinks is None else sinks.data_ptr(),
                prepared.window,
            ),
            *(work[1].shape[0], work[2].shape[0], prepared.tma_groups, rows),
        )
        describe, layout = _describe(q, k_pages, work, nodes, variant), ATTENTION_LAYOUT[prepared.maps]
        grid, threads, shared = (prepared.blocks, 1, 1), prepared.threads, prepared.shared
        launch(function, layout, values, grid, threads, shared, describe, cooperative=True, pdl=uses_tma)
        return out, lse


def partials_workspace(elements: int, device: torch.device) -> Tensor:
    """Float32 workspace for a call's partial states, from torch's allocator; the next call on the stream may reuse it.

    While a graph is captured it is in the graph's memory pool, and lives as long as the graph.  It has up to an eighth
    more elements than asked for, but no more than the next power of two: trees grow little by little, and torch's
    allocator should find the block of the last call.
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
