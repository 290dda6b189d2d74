"""What the ops demand of their arguments: shapes, dtypes, devices and strides.  Only checked mode reads data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.attention.variants import Variant

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Pages of K and V hold numbers of a dtype in FLOATS, or such numbers rounded to e4m3.
FP8 = torch.float8_e4m3fn
STORED = (*FLOATS, FP8)
# A plan packed for the GPU's kernels, as csrc/attention/plan.cuh describes it.
PACKED = ("counts", "tile_items", "decode_items", "segments", "merge_indptr", "merge_indices", "limits")
NODES = ("start", "length", "page_indptr", "pages", "first_slot")


class BadShape(ValueError):
    """A tensor's shape or strides do not fit the op or its other tensors."""


class BadDtype(TypeError):
    """A tensor's dtype is not the one that the op takes."""


class BadDevice(ValueError):
    """Tensors of one call are on different devices."""


def expect(
    op: str,
    name: str,
    tensor: Tensor,
    shape: object = "",
    fits: bool = True,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    like: str = "",
) -> None:
    """Raise BadShape unless a tensor ``fits``, BadDtype or BadDevice unless it has one of ``dtypes`` on ``device``."""
    if not fits:
        raise BadShape(f"{op}: {name} must have shape {shape}, got {list(tensor.shape)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise BadDtype(f"{op}: {name} must be {wanted}{like}, got {tensor.dtype}; convert it with .to()")
    if device is not None and tensor.device != device:
        raise BadDevice(f"{op}: {name} is on {tensor.device}, but the first tensor is on {device}; move it with .to()")


def check_tensors(op: str, **given: object) -> None:
    """Raise TypeError, with the argument's name, if an argument is no tensor."""
    for name, one in given.items():
        if not isinstance(one, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(one).__name__}; torch.as_tensor() makes one")


def check_pages(op: str, k_pages: Tensor, v_pages: Tensor) -> None:
    """Pages of K and V of one layer: alike except for ``head_dim``, with the elements of a head adjacent."""
    near = k_pages.stride()[3:] == v_pages.stride()[3:] == (1,)  # both have four dimensions
    alike = k_pages.device == v_pages.device and k_pages.shape[:3] == v_pages.shape[:3]
    if near and alike and k_pages.dtype == v_pages.dtype and k_pages.dtype in STORED:
        return  # each layer of a step comes here, and the texts below are for errors only
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        expect(op, name, pages, "[pages, page_size, kv_heads, head_dim]", pages.ndim == 4, STORED)
        if pages.stride(3) != 1:
            raise BadShape(f"{op}: {name} must have stride 1 over head_dim, got strides {list(pages.stride())}")
    like, (num_pages, page_size, kv_heads, _) = " like k_pages", k_pages.shape
    shape, fits = f"[{num_pages}, {page_size}, {kv_heads}, v_dim]{like}", v_pages.shape[:3] == k_pages.shape[:3]
    expect(op, "v_pages", v_pages, shape, fits, (k_pages.dtype,), k_pages.device, like)


def check_slots(op: str, name: str, slots: Tensor, device: torch.device) -> None:
    """Slots (or positions): ``[N]`` int64."""
    expect(op, name, slots, "[N]", slots.ndim == 1, (torch.int64,), device)


def check_append(
    key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, op: str = "kv_append"
) -> None:
    """Arguments of ``kv_append``."""
    check_pages(op, k_pages, v_pages)
    check_slots(op, "slots", slots, k_pages.device)
    tokens = slots.shape[0]
    for name, tensor, pages in (("key", key, k_pages), ("value", value, v_pages)):
        kv_heads, head_dim, fits = *pages.shape[2:], tensor.shape == (tokens, *pages.shape[2:])
        if fits and tensor.dtype == pages.dtype != FP8 and tensor.device == k_pages.device:
            continue
        expected = f"[{tokens}, {kv_heads}, {head_dim}] (slots, then kv_heads and head_dim of the pages)"
        _expect_like(k_pages, op, name, tensor, expected, fits, key)


def check_index_append(keys: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Arguments of ``index_append``."""
    op = "index_append"
    expect(op, "pages", pages, "[pages, page_size, heads, dim]", pages.ndim == 4, FLOATS)
    if pages.stride(3) != 1:
        raise BadShape(f"{op}: pages must have stride 1 over dim, got strides {list(pages.stride())}")
    check_slots(op, "slots", slots, pages.device)
    shape = (slots.shape[0], *pages.shape[2:])
    expected = f"{list(shape)} (slots, then heads and dim of the pages)"
    _expect_like(pages, op, "keys", keys, expected, tuple(keys.shape) == shape)


def _expect_like(
    pages: Tensor, op: str, name: str, tensor: Tensor, shape: str, fits: bool, computed: Tensor | None = None
) -> None:
    """``computed``: the tensor whose dtype all uncached tensors share, if pages may hold it in fewer bits."""
    if pages.dtype != FP8 or computed is None:
        expect(op, name, tensor, shape, fits, (pages.dtype,), pages.device, " like the pages")
    else:
        dtypes = FLOATS if computed is tensor else (computed.dtype,)
        expect(op, name, tensor, shape, fits, dtypes, pages.device, " beside pages in e4m3")


def check_rotary(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> None:
    """Arguments of ``rotary_append``."""
    op = "rotary_append"
    check_append(key, value, k_pages, v_pages, slots, op)
    tokens, head_dim = slots.shape[0], k_pages.shape[3]
    if head_dim % 2:
        raise BadShape(f"{op}: halves of a head turn against each other, but head_dim is {head_dim}")
    fits = q.ndim == 3 and q.shape[0] == tokens and q.shape[2] == head_dim
    _expect_like(k_pages, op, "q", q, f"[{tokens}, heads, {head_dim}] (slots, then head_dim of the pages)", fits, key)
    for name, tensor in (("cos", cos), ("sin", sin)):
        fits = tensor.shape == (tokens, head_dim)
        _expect_like(k_pages, op, name, tensor, f"[{tokens}, {head_dim}]", fits, key)


def check_pair(x: Tensor, weight: Tensor) -> None:
    """Arguments of ``linear_pair``."""
    op, fits = "linear_pair", weight.ndim == 2 and weight.shape[0] % 2 == 0 and weight.is_contiguous()
    expect(op, "weight", weight, "[columns, width], contiguous, columns of two equal weights", fits, FLOATS)
    width = weight.shape[1]
    fits = x.ndim > 0 and x.shape[-1] == width
    expect(op, "x", x, f"[..., {width}] (width of weight)", fits, (weight.dtype,), weight.device, " like weight")


def check_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_positions: Tensor,
    variant: Variant,
    sinks: Tensor | None,
    rotary_pages: Tensor | None = None,
) -> None:
    """Arguments of ``tree_attention`` that differ from layer to layer; :func:`check_packed` has the others."""
    op, of = "tree_attention", "k_pages"
    check_pages(op, k_pages, v_pages)
    kv_heads, head_dim = k_pages.shape[2:]
    if rotary_pages is not None:
        size = k_pages.shape[:2]
        fits = rotary_pages.ndim == 4 and rotary_pages.shape[:3] == (*size, 1) and rotary_pages.stride(3) == 1
        shape = f"[{size[0]}, {size[1]}, 1, rotary], stride 1 over rotary"
        _expect_like(k_pages, op, "rotary_pages", rotary_pages, shape, fits)
        head_dim, of = head_dim + rotary_pages.shape[3], "k_pages and rotary_pages"
    fits = q.ndim == 3 and q.shape[2] == head_dim
    _expect_like(k_pages, op, "q", q, f"[T, heads, {head_dim}] (head_dim of {of})", fits, q)
    if q.shape[1] < 1 or q.shape[1] % kv_heads:
        raise BadShape(f"{op}: q has {q.shape[1]} heads, which must be a multiple of the pages' {kv_heads} KV heads")
    _check_rows(op, q, q_positions, variant, sinks)


def check_latents(q: Tensor, latent_pages: Tensor, rotary_pages: Tensor, q_positions: Tensor) -> None:
    """Arguments of ``latent_attention`` that differ from layer to layer."""
    op, size = "latent_attention", latent_pages.shape[:2]
    fits = latent_pages.ndim == 4 and latent_pages.shape[2] == 1
    expect(op, "latent_pages", latent_pages, "[pages, page_size, 1, latent]", fits, FLOATS)
    fits = rotary_pages.ndim == 4 and rotary_pages.shape[:3] == (*size, 1)
    _expect_like(latent_pages, op, "rotary_pages", rotary_pages, f"[{size[0]}, {size[1]}, 1, rotary]", fits)
    for name, pages in (("latent_pages", latent_pages), ("rotary_pages", rotary_pages)):
        if pages.stride(3) != 1:
            raise BadShape(f"{op}: {name} must have stride 1 over its elements, got strides {list(pages.stride())}")
    width = latent_pages.shape[3] + rotary_pages.shape[3]
    fits = q.ndim == 3 and q.shape[2] == width
    _expect_like(latent_pages, op, "q", q, f"[T, heads, {width}] (elements of a latent, then of a rotary key)", fits)
    check_positions(q, q_positions, op)


def check_states(
    first: Tensor,
    first_lse: Tensor,
    first_place: Tensor,
    second: Tensor,
    second_lse: Tensor,
    second_place: Tensor,
    dtype: torch.dtype | None,
) -> None:
    """Arguments of ``merge_states``."""
    op, rows = "merge_states", first_place.shape[0]
    if dtype not in (None, first.dtype) and (first.dtype != torch.float32 or dtype not in FLOATS):
        raise BadDtype(
            f"{op}: dtype must be that of the states, or any for states of float32; got {dtype} for {first.dtype}"
        )
    states = ("first", first, first_lse, first_place), ("second", second, second_lse, second_place)
    for name, out, lse, place in states:
        fits = out.ndim == 3 and out.shape[1:] == first.shape[1:] and out.is_contiguous()
        _expect_like(first, op, name, out, "[its rows, heads, v_dim], contiguous", fits)
        fits, shape = lse.shape == out.shape[:2] and lse.is_contiguous(), list(out.shape[:2])
        expect(op, f"{name}_lse", lse, f"{shape}, contiguous", fits, (torch.float32,), first.device)
        fits = place.shape == (rows,) and place.is_contiguous()
        expect(op, f"{name}_place", place, f"[{rows}], contiguous", fits, (torch.int32,), first.device)


def check_expanded(
    q: Tensor, cached: Sequence[Tensor], q_positions: Tensor, variant: Variant, sinks: Tensor | None
) -> None:
    """Arguments of ``expanded_attention``: pages of any heads and sizes, of one pool."""
    op = "expanded_attention"
    _check_cached(op, cached)
    _expect_like(cached[0], op, "q", q, "[T, heads, k_dim]", q.ndim == 3)
    _check_rows(op, q, q_positions, variant, sinks)


def _check_cached(op: str, cached: Sequence[Tensor]) -> None:
    if not cached:
        raise BadShape(f"{op}: cached must hold the pages of one tensor at least, got none")
    first = cached[0]
    for index, pages in enumerate(cached):
        name, fits = f"cached[{index}]", pages.ndim == 4 and pages.shape[:2] == first.shape[:2]
        expect(op, name, pages, "[pages, page_size, heads, dim] (pages, page_size of cached[0])", fits, FLOATS)
        expect(op, name, pages, "", dtypes=(first.dtype,), device=first.device, like=" like cached[0]")
        if pages.stride(3) != 1:
            raise BadShape(f"{op}: {name} must have stride 1 over dim, got strides {list(pages.stride())}")


def check_absorbed(q: Tensor, cached: Sequence[Tensor], q_positions: Tensor) -> None:
    """Arguments of ``absorbed_attention``: pages of latents and of rotary keys, each of one head."""
    op = "absorbed_attention"
    _check_cached(op, cached)
    heads, size = [pages.shape[2] for pages in cached], sum(pages.shape[3] for pages in cached)
    if any(count != 1 for count in heads):
        raise BadShape(f"{op}: cached must have one head, got {heads}")
    fits = q.ndim == 3 and q.shape[2] == size
    dtypes = (torch.float32, cached[0].dtype)
    expect(op, "q", q, f"[rows, heads, {size}] (latent and rotary)", fits, dtypes, cached[0].device, " like cached")
    check_positions(q, q_positions, op)


def check_selected(op: str, selected: Tensor, q: Tensor) -> None:
    """``selected``: the positions that each row of q sees."""
    fits = selected.ndim == 2 and selected.shape[0] == q.shape[0]
    expect(op, "selected", selected, f"[{q.shape[0]}, positions] (rows of q)", fits, (torch.bool,), q.device)


def check_bias(op: str, bias: Tensor, q: Tensor) -> None:
    """``bias``: the numbers that are added to the scores of each row of q."""
    fits = bias.ndim == 3 and bias.shape[:2] == q.shape[:2]
    rows, heads = q.shape[:2]
    expect(op, "bias", bias, f"[{rows}, {heads}, positions] (rows and heads of q)", fits, FLOATS, q.device)


def _check_rows(op: str, q: Tensor, q_positions: Tensor, variant: Variant, sinks: Tensor | None) -> None:
    """Positions of the rows of q, and sinks if the variant has them."""
    check_positions(q, q_positions, op)
    if (sinks is not None) != variant.has_sinks:
        has, given = ("has sinks", "none are given") if variant.has_sinks else ("has no sinks", "some are given")
        raise BadShape(f"{op}: variant {variant.name!r} {has}, but {given}; see attention_sinks()")
    if variant.fewest_heads is not None and variant.fewest_heads < q.shape[1]:
        raise BadShape(
            f"{op}: variant {variant.name!r} captures a tensor with numbers for {variant.fewest_heads} heads, which it "
            f"indexes by h, but q has {q.shape[1]} heads"
        )
    if sinks is not None:
        fits = sinks.shape == q.shape[1:2] and sinks.is_contiguous()
        expect(op, "sinks", sinks, f"[{q.shape[1]}] (heads of q), contiguous", fits, (q.dtype,), q.device, " like q")


def check_positions(q: Tensor, q_positions: Tensor, op: str = "tree_attention") -> None:
    """``q_positions``: one position for each row of q."""
    check_slots(op, "q_positions", q_positions, q.device)
    expect(op, "q_positions", q_positions, f"[{q.shape[0]}] (rows of q)", q_positions.shape[0] == q.shape[0])


def check_packed(rows: int, work: Sequence[Tensor], nodes: Sequence[Tensor]) -> None:
    """A plan and a tree, as the GPU's kernels take them."""
    op = "tree_attention"
    check_work(op, work)
    expect(op, "work.merge_indptr", work[4], f"[{rows} + 1] or more (rows of q)", work[4].shape[0] > rows)
    check_nodes(op, nodes, work[0].device)


def check_work(op: str, work: Sequence[Tensor], device: torch.device | None = None) -> None:
    """A plan: the int32 tensors :data:`PACKED`; they may be larger than their contents."""
    check_ints(op, "work", PACKED, work, device)
    counts, *tables, merge_indptr, merge_indices, limits = work
    expect(op, "work.counts", counts, "[8]", counts.shape == (8,))
    for name, table, of, width in zip(PACKED[1:4], tables, ("items", "items", "segments"), (8, 8, 3), strict=True):
        expect(op, f"work.{name}", table, f"[{of}, {width}]", table.ndim == 2 and table.shape[1] == width)
    expect(op, "work.merge_indptr", merge_indptr, "[rows + 1]", merge_indptr.ndim == 1 and merge_indptr.shape[0] > 0)
    for name, array in (("merge_indices", merge_indices), ("limits", limits)):
        expect(op, f"work.{name}", array, "[partial rows]", array.ndim == 1)


def check_ints(
    op: str, argument: str, names: Sequence[str], tensors: Sequence[Tensor], device: torch.device | None = None
) -> None:
    """int32 tensors on one device, one for each name."""
    if len(tensors) != len(names):
        raise BadShape(f"{op}: {argument} must be the {len(names)} tensors {', '.join(names)}, got {len(tensors)}")
    device = device or tensors[0].device
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != torch.int32 or tensor.device != device:  # names are for errors only
            expect(op, f"{argument}.{name}", tensor, dtypes=(torch.int32,), device=device)


def check_nodes(op: str, nodes: Sequence[Tensor], device: torch.device) -> None:
    """A tree: the int32 tensors :data:`NODES`."""
    check_ints(op, "nodes", NODES, nodes, device)
    start, length, page_indptr, _, first_slot = nodes
    for name, tensor, extra in (("length", length, 0), ("page_indptr", page_indptr, 1), ("first_slot", first_slot, 0)):
        expected = f"[{start.shape[0] + extra}] ({start.shape[0]} nodes)"
        expect(op, f"nodes.{name}", tensor, expected, tensor.shape[0] == start.shape[0] + extra)


def check_append_slots(op: str, slots: Tensor, pages: Tensor) -> None:
    """IndexError: a slot does not exist and is not -1 (write nothing).  ValueError: a slot is written twice."""
    if capturing(slots) or not len(slots := slots[slots != -1]):
        return
    low, high, num_slots = int(slots.min()), int(slots.max()), pages.shape[0] * pages.shape[1]
    if low < 0 or high >= num_slots:
        raise IndexError(f"{op}: slots must be 0..{num_slots - 1}, got {low}..{high}")
    if len(torch.unique(slots)) < len(slots):
        raise ValueError(f"{op}: slots must be distinct, for two tokens cannot share a slot")


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is capturing ops on this tensor."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_experts(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, per: int) -> None:
    """Arguments of ``expert_product``."""
    op, device = "expert_product", x.device
    expect(op, "x", x, "[rows, k]", x.ndim == 2, FLOATS)
    fits = weight.ndim == 3 and weight.shape[1] == x.shape[1]
    expect(op, "weight", weight, f"[experts, {x.shape[1]}, n]", fits, (x.dtype,), device, " like x")
    if weight.stride(2) != 1 and weight.stride(1) != 1:
        raise BadShape(f"{op}: weight must have stride 1 over k or n, got strides {list(weight.stride())}")
    fits = index.ndim == 2 and index.is_contiguous() and index.shape[0] * index.shape[1] == x.shape[0] * per
    expect(op, "index", index, f"{per} pairs for each row of x, contiguous", fits, (torch.int64,), device)
    if bias is not None:
        shape = weight.shape[0], weight.shape[2]
        fits = bias.shape == shape and bias.is_contiguous()
        expect(op, "bias", bias, f"{list(shape)}, contiguous", fits, (x.dtype,), device, " like x")
