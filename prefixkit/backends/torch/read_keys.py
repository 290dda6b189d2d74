"""K and V of a call, from the pool's pages: read in place, gathered, or expanded from cached tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prefixkit.backends.torch import tuning
from prefixkit.backends.torch.program.attention_calls import Call
from prefixkit.backends.torch.tuning import Heads
from prefixkit.ops.arguments import FP8, BadShape

# A module's own code: from cached tensors ``[1, heads, n, dim]`` of n tokens to K ``[1, kv_heads, n, k_dim]`` and V
# ``[1, kv_heads, n, v_dim]``.
Expand = Callable[..., tuple[Tensor, Tensor]]
# Keys; or, if scores are computed in plain torch, the keys' elements in several tensors, one after another.
Keys = Tensor | tuple[Tensor, ...]
# K and V ``[batch, kv_heads, length, ...]`` of a call; valid until those of the next call are read.
Read = Callable[[Call], tuple[Keys, Tensor]]


def check_layout(op: str, name: str, pages: Tensor) -> None:
    """Raise BadShape unless pages have the layout that :func:`read_keys` reads."""
    _, page_size, kv_heads, head_dim = pages.shape
    per_page, per_token, per_head, _ = pages.stride()
    if per_page != page_size * per_token or (kv_heads > 1 and per_head != head_dim):
        raise BadShape(
            f"{op}: on the CPU {name} must be token-major, with slots evenly spaced and a token's heads "
            f"adjacent, got shape {list(pages.shape)} and strides {list(pages.stride())}; make it with KVPool, or "
            "copy K and V into a contiguous tensor [pages, page_size, kv_heads, head_dim] each"
        )


def check_layouts(op: str, cached: Sequence[Tensor]) -> None:
    """:func:`check_layout` of all that a layer caches."""
    for index, pages in enumerate(cached):
        check_layout(op, f"cached[{index}]", pages)


class Scratch(threading.local):
    """Buffers that a CPU thread keeps until it ends.

    New buffers would cost a page fault per 4 KB, as much time as filling them.  There are eleven at most, for keys
    and for values in five dtypes and for scores, each of up to ``Tuning.call_elements`` elements.  So a thread keeps
    480 MiB at most, and 128 MiB while all tensors are float32 and no scores are in memory.  A call that needs more
    allocates it.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def matrix(self, use: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[rows, width]`` for keys (``use`` 0), values (1) or scores (2), with undefined content."""
        elements = rows * width
        buffer = self.buffers.get((use, dtype))
        if buffer is None or buffer.shape[0] < elements:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
                buffer = torch.empty(elements, dtype=dtype, device="cpu")
            if elements <= tuning.CPU.call_elements:
                self.buffers[use, dtype] = buffer
        return buffer.as_strided((rows, width), (width, 1))


scratch = Scratch()
_NUMBERS = torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8).float()  # of e4m3, by their bytes


def read_keys(call: Call, pages: Tensor, use: int) -> Tensor:
    """``[batch, kv_heads, length, head_dim]`` float32 keys or values, a view of token-major pages if possible."""
    kv_heads, head_dim = pages.shape[2:]
    tokens, width = call.batch * call.length, kv_heads * head_dim
    if isinstance(call.slot, int):
        step = pages.stride(1)
        keys = pages.as_strided((tokens, width), (step, 1), pages.storage_offset() + call.slot * step)
    else:
        keys = scratch.matrix(use, tokens, width, pages.dtype)
        torch.index_select(_slots(pages), 0, call.slot, out=keys)
    if keys.dtype == FP8:  # by a table, because torch's own conversion of e4m3 is four times as slow
        index = scratch.matrix(use, tokens, width, torch.int32).copy_(keys.view(torch.uint8))
        keys = scratch.matrix(use, tokens, width, torch.float32)
        torch.index_select(_NUMBERS, 0, index.view(-1), out=keys.view(-1))
    elif keys.dtype != torch.float32:
        keys = scratch.matrix(use, tokens, width, torch.float32).copy_(keys)
    step = keys.stride(0)
    shape = (call.batch, kv_heads, call.length, head_dim)
    return keys.as_strided(shape, (call.length * step, head_dim, step, 1))


def _slots(pages: Tensor) -> Tensor:
    """A view ``[slots, kv_heads * head_dim]`` of token-major pages."""
    num_pages, page_size, kv_heads, head_dim = pages.shape
    return pages.as_strided((num_pages * page_size, kv_heads * head_dim), (pages.stride(1), 1))


def gather(call: Call, pages: Tensor) -> Tensor:
    """``[batch, kv_heads, length, head_dim]`` a copy of a call's keys or values, from pages of any layout."""
    assert isinstance(call.slot, Tensor), "only a program for a CPU reads keys where they lie"
    size, (kv_heads, head_dim) = pages.shape[1], pages.shape[2:]
    # e4m3 is read as bytes, which all of torch's ways to index support.
    read = pages.view(torch.uint8) if pages.dtype == FP8 else pages
    keys = read[call.slot // size, call.slot % size].view(pages.dtype)
    return keys.reshape(call.batch, call.length, kv_heads, head_dim).transpose(1, 2)


def read_kv(call: Call, k_pages: Tensor, v_pages: Tensor, dtype: torch.dtype, *, on_cpu: bool) -> tuple[Tensor, Tensor]:
    """K and V of a call in the queries' ``dtype``; float32 on a CPU."""
    if on_cpu:
        return read_keys(call, k_pages, 0), read_keys(call, v_pages, 1)
    return gather(call, k_pages).to(dtype), gather(call, v_pages).to(dtype)


def read_latents(call: Call, cached: Sequence[Tensor], *, on_cpu: bool) -> tuple[Keys, Tensor]:
    """K and V of a call over latents: K is the latent and the rotary key, V the latent; float32 on a CPU."""
    used = [pages for pages in cached if pages.shape[3]]
    if on_cpu:
        parts = tuple(read_keys(call, pages, use) for use, pages in enumerate(used))
    else:
        parts = tuple(gather(call, pages) for pages in used)
    return parts, parts[0]


def expand_keys(
    call: Call, cached: Sequence[Tensor], expand: Expand, heads: Heads, *, on_cpu: bool
) -> tuple[Tensor, Tensor]:
    """K and V ``[batch, kv_heads, length, ...]`` of a call, expanded from the cached tensors; float32 on a CPU."""
    tokens = call.batch * call.length
    made = expand(*(_cached_tokens(call, pages, tokens) for pages in cached))
    states = []
    for name, each, dim in zip("kv", made, (heads.head_dim, heads.value_dim), strict=True):
        if each.shape != (1, heads.kv_heads, tokens, dim):
            raise BadShape(
                f"expanded_attention: expand must return {name} [1, {heads.kv_heads}, {tokens}, {dim}] for {tokens} "
                f"tokens, as the plan's heads are, got {list(each.shape)}"
            )
        each = each[0] if each.stride(3) == 1 else each[0].contiguous()
        each = torch.unflatten(each, 1, (call.batch, call.length)).transpose(0, 1)
        states.append(each.float() if on_cpu else each)
    return states[0], states[1]


def _cached_tokens(call: Call, pages: Tensor, tokens: int) -> Tensor:
    """``[1, heads, tokens, dim]`` the cached tensor of a call's tokens."""
    if isinstance(call.slot, int):
        rows = torch.unflatten(_slots(pages).narrow(0, call.slot, tokens), 1, pages.shape[2:])
    else:
        rows = pages[call.slot // pages.shape[1], call.slot % pages.shape[1]]
    return rows.transpose(0, 1)[None]
