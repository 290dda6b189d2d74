"""Tensor maps, by which TMA copies a pool's pages into shared memory, swizzled."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from cuda.bindings import driver  # imported only where cuda-core is
from torch import Tensor

from prefixkit.cuda.launch import LaunchCache, fail
from prefixkit.cuda.struct_layout import TENSOR_MAP

# A TMA tile has 64 columns, because the 128-byte swizzle spans 64 elements of 16 bits; its rows are a group of slots.
COLUMNS = 64
GROUP, FEW = 16, 4

TensorMaps = tuple[bytes, ...]


def holds_groups(page_size: int) -> bool:
    """Whether no group of 16 slots crosses a page's end, so that one TMA tile can copy each group."""
    return page_size % GROUP == 0 and page_size & (page_size - 1) == 0


def cached_tensor_maps(
    made: LaunchCache[TensorMaps],
    k_pages: Tensor,
    v_pages: Tensor,
    signature: Hashable,
    rotary_pages: Tensor | None = None,
    make: Callable[..., TensorMaps] | None = None,
) -> TensorMaps:
    """The maps of a layer's pages by ``make``, else by :func:`tensor_maps`: made once per addresses and signature.

    ``signature``: shapes, strides and dtype, on which maps depend too.
    """
    rotary = None if rotary_pages is None else rotary_pages.data_ptr()
    key = k_pages.data_ptr(), v_pages.data_ptr(), rotary, signature
    return made.get(key) or made.store(key, (make or tensor_maps)(k_pages, v_pages, rotary_pages))


def tensor_maps(k_pages: Tensor, v_pages: Tensor, rotary_pages: Tensor | None = None) -> TensorMaps:
    """The seven tensor maps of a layer's pages, which come first in the kernel's parameter.

    For K and for V: TMA tiles of a group of slots, of one slot, and of a group over the whole head size; for V also TMA
    tiles of a few slots.  If there are rotary pages, the first two kinds follow for them.  Strides of pages must be
    multiples of 16 bytes.
    """
    maps, k_pages, v_pages = [], in_words(k_pages), in_words(v_pages)
    for rows, whole in ((GROUP, False), (1, False), (GROUP, True)):
        for pages in (k_pages, v_pages):
            exists = rows == 1 or (holds_groups(pages.shape[1]) and not (whole and pages.shape[3] % COLUMNS))
            maps.append(_encode(pages, rows, whole) if exists else bytes(TENSOR_MAP.size))
    maps.append(_encode(v_pages, FEW, False) if holds_groups(v_pages.shape[1]) else bytes(TENSOR_MAP.size))
    if rotary_pages is not None:
        maps.append(
            _encode(rotary_pages, GROUP, False) if holds_groups(rotary_pages.shape[1]) else bytes(TENSOR_MAP.size)
        )
        maps.append(_encode(rotary_pages, 1, False))
    return tuple(maps)


def in_words(pages: Tensor) -> Tensor:
    """Pages in e4m3 viewed as half as many 16-bit numbers, which kernels load; other pages unchanged."""
    return pages.view(torch.bfloat16) if pages.dtype == torch.float8_e4m3fn else pages


def _encode(pages: Tensor, rows: int, whole: bool) -> bytes:
    """A map whose TMA tiles are ``rows`` slots of one head of one page, by 64 columns or the whole head size.

    The driver's dimensions go innermost first.
    """
    count, slots, kv_heads, head_dim = pages.shape
    page, slot, head, _ = pages.stride()
    if whole:
        sizes = [COLUMNS, slots, head_dim // COLUMNS, kv_heads, count]
        strides = [slot, COLUMNS, head, page]
        tile = [COLUMNS, rows, head_dim // COLUMNS, 1, 1]
    else:
        sizes, strides, tile = [head_dim, slots, kv_heads, count], [slot, head, page], [COLUMNS, rows, 1, 1]
    half = pages.dtype == torch.float16
    types = driver.CUtensorMapDataType
    status, encoded = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if half else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(sizes),
        pages.data_ptr(),
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(2 * stride) for stride in strides],
        [driver.cuuint32_t(size) for size in tile],
        [driver.cuuint32_t(1)] * len(tile),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,  # 256 B: 7% less bandwidth (H200)
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        fail(int(status), f"tensor map of pages {list(pages.shape)} strides {list(pages.stride())}")
    # The driver's object is a list of 64-bit words.
    return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)
