"""Launches of ``tree_attention`` and ``latent_attention`` without addresses: checked and prepared once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixkit.attention.variants import Variant, lookup
from prefixkit.backends.cuda.device_planner import NO_FLOAT32, say_plain_torch
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
from prefixkit.cuda import jit
from prefixkit.cuda.launch import signature_of
from prefixkit.cuda.tensor_maps import holds_groups, in_words
from prefixkit.ops.arguments import FP8, BadShape, check_attention, check_latents

# Without tensor maps the offset of a row is a 32-bit count of 16-byte units.
MOST_BYTES = 2**36


class UnsupportedHeads(BadShape):
    """The kernels have no instantiation for a head size."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch without its arguments' addresses.  ``function`` is None if plain torch runs the op."""

    function: jit.Function | None
    v_dim: int = 0
    out_dtype: torch.dtype = torch.float32
    blocks: int = 0
    threads: int = 0
    shared: int = 0
    numbers: tuple[int, ...] = ()
    modified: bool = False  # scores are modified by functions of a variant
    reads_sequence: bool = False
    looks_ahead: bool = False
    window: int = 0
    tma_groups: bool = False
    maps: Maps = Maps.NONE
    pages_signature: tuple[int, ...] = ()


def launch_signature(
    key: str, q: Tensor, k_pages: Tensor, v_pages: Tensor, sinks: Tensor | None, rotary_pages: Tensor | None = None
) -> Hashable:
    """The key of cached launches: everything but the number of queries, which differs from step to step."""
    of_pages = signature_of(k_pages), signature_of(v_pages)
    others = (None if tensor is None else signature_of(tensor) for tensor in (sinks, rotary_pages))
    return key, q.shape[1:], q.dtype, q.device, of_pages, *others


def prepare_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rotary_pages: Tensor | None,
    q_positions: Tensor,
    key: str,
    sinks: Tensor | None,
) -> Prepared:
    """Check the arguments that differ from layer to layer, and choose the kernel."""
    variant = lookup(key)
    check_attention(q, k_pages, v_pages, q_positions, variant, sinks, rotary_pages)
    device = k_pages.device.index
    arch = jit.arch_of(device)
    if q.dtype == torch.float32:
        say_plain_torch(NO_FLOAT32)
        return Prepared(None)
    if not variant.traced:
        say_plain_torch(f"variant {variant.name!r} is not traced")
        return Prepared(None)
    heads, head_dim = q.shape[1:]
    gqa_group = heads // k_pages.shape[2]
    v_dim = v_pages.shape[3]
    if rotary_pages is None:
        kernel = kernel_for(arch, head_dim, gqa_group, v_dim, e4m3=k_pages.dtype == FP8)
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
    k_pages, v_pages = in_words(k_pages), in_words(v_pages)
    page = k_pages.stride(0)
    if not kernel.uses_tma and k_pages.shape[0] * page * k_pages.element_size() > MOST_BYTES:
        raise BadShape(
            f"tree_attention: this kernel reaches {MOST_BYTES >> 30} GiB of keys, from page to page "
            f"{page * k_pages.element_size()} bytes, got {k_pages.shape[0]} pages; make a smaller pool, or one tensor "
            "per layer"
        )
    return _prepared(kernel, q, (k_pages, v_pages, rotary_pages), k_pages.shape[2], v_dim, variant, key)


def prepare_latents(
    q: Tensor,
    latent_pages: Tensor,
    v_pages: Tensor,
    rotary_pages: Tensor | None,
    q_positions: Tensor,
    key: str,
    sinks: Tensor | None,
) -> Prepared:
    """The same for ``latent_attention``."""
    assert rotary_pages is not None, "the op has them"
    check_latents(q, latent_pages, rotary_pages, q_positions)
    latent, rotary = latent_pages.shape[3], rotary_pages.shape[3]
    arch = jit.arch_of(latent_pages.device.index)
    kernel, groups = latent_kernel_for(arch, latent, rotary), latent_groups(q.shape[1])
    if kernel is None or groups is None or q.dtype == torch.float32:
        raise UnsupportedHeads(
            f"latent_attention: on Hopper the kernel serves latents of 256 or 512 in 16 bits, rotary keys of up to 64, "
            f"and heads that divide into groups of up to 64; got {latent}, {rotary}, {q.shape[1]} heads and {q.dtype}; "
            "plan the step with the backend's planner for latents, which leaves it to plain torch"
        )
    _check_strides("latent_attention", latent_pages, rotary_pages)
    return _prepared(kernel, q, (latent_pages, v_pages, rotary_pages), groups, latent, lookup(key), key)


def check_begins(op: str, *pages: Tensor) -> None:
    """Raise BadShape unless the addresses of pages are multiples of 16 bytes."""
    for each in pages:
        if each.data_ptr() & 15:
            raise BadShape(f"{op}: pages must begin at multiples of 16 bytes; make them with KVPool")


def _check_strides(op: str, *pages: Tensor) -> None:
    """Raise BadShape unless the addresses of all rows of pages are multiples of 16 bytes."""
    check_begins(op, *pages)  # pages in e4m3 are read as 16-bit words, which need an even address
    for each in pages:
        vector = 16 // each.element_size()
        if any(stride % vector for stride in each.stride()[:3]):
            raise BadShape(
                f"{op}: strides of pages in {each.dtype} must be multiples of {vector}, got {each.stride()}; make them "
                "with KVPool"
            )


def _prepared(
    kernel: Kernel,
    q: Tensor,
    pages: tuple[Tensor, Tensor, Tensor | None],
    kv_heads: int,
    v_dim: int,
    variant: Variant,
    key: str,
) -> Prepared:
    """The launch for pages that a kernel supports; pages in e4m3 are read as 16-bit words."""
    k_pages = pages[0]
    half, device, (heads, head_dim) = q.dtype == torch.float16, k_pages.device.index, q.shape[1:]
    function = jit.load(attention_unit(kernel, head_dim, half, variant, v_dim), device)[kernel.name]
    blocks = kernel.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    shared = function.max_shared if kernel.shared is None else kernel.shared
    page, slot, head, _ = k_pages.stride()
    return Prepared(
        ATTENTION_LAYOUT[kernel.maps].check(function),
        v_dim,
        torch.float32 if variant.is_part else q.dtype,
        blocks,
        kernel.threads,
        shared,
        numbers=(page, head, slot, heads, kv_heads, k_pages.shape[1]),
        modified=bool(variant.mods) or variant.looks_ahead,
        reads_sequence=variant.reads("b"),
        looks_ahead=variant.looks_ahead,
        window=variant.window or 0,
        tma_groups=holds_groups(k_pages.shape[1]),
        maps=kernel.maps,
        pages_signature=(*(n for each in pages if each is not None for n in (*each.shape, *each.stride())), half),
    )
