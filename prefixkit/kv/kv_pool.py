"""The page tensors that hold keys and values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.gpu.staging import upload
from prefixkit.ops import library as ops  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.ops.arguments import FLOATS


@dataclass(frozen=True)
class KVSpec:
    """The KV of one token of a model.

    Attributes:
        num_layers: Attention layers.
        kv_heads: KV heads of a layer; those of this process under tensor parallelism.
        head_dim: Elements of one head.
        dtype: float32, bfloat16 or float16.
        device: Where the pages live.

    Raises:
        ValueError: a count below 1, or another dtype.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVSpec: {name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in FLOATS:
            raise ValueError(f"KVSpec: dtype must be one of {', '.join(map(str, FLOATS))}, got {self.dtype}")
        object.__setattr__(self, "device", torch.device(self.device))

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVPoolTooLarge(ValueError):
    """The memory for a pool's pages cannot be had."""


class KVPool:
    """Pages of keys and values for all layers, addressed by slot: ``slot = page * page_size + offset``.

    Keys are one tensor and values another.  Memory is reserved at once but never touched before it is written, so the
    operating system gives out pages as tokens come.  On the CPU a token's heads are adjacent and tokens follow each
    other, so that consecutive slots are one matrix; on a GPU each page keeps head after head.

    Attributes:
        spec: The KV of one token.
        num_pages, page_size: The geometry; ``page_size`` in tokens.

    Raises:
        ValueError: no pages, or a page size outside 1 to 128.
        KVPoolTooLarge: the device has not that much memory.
    """

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int = 16) -> None:
        if num_pages < 1:
            raise ValueError(f"KVPool: num_pages must be at least 1, got {num_pages}")
        if not 1 <= page_size <= 128:
            raise ValueError(f"KVPool: page_size must be 1 to 128 tokens, got {page_size}")
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        try:
            self._layers = self._pages(), self._pages()
        except RuntimeError as error:  # torch's OutOfMemoryError is one too
            free = free_memory(spec.device) / 2**30
            raise KVPoolTooLarge(
                f"KV for {num_pages * page_size} tokens takes {self.bytes / 2**30:.1f} GiB, which {spec.device} cannot "
                f"give ({free:.1f} GiB are free); lower kv_budget"
            ) from error
        self._k: tuple[Tensor, ...] = tuple(self._layers[0])
        self._v: tuple[Tensor, ...] = tuple(self._layers[1])

    def _pages(self) -> Tensor:
        spec = self.spec
        inner = (self.page_size, spec.kv_heads) if spec.device.type == "cpu" else (spec.kv_heads, self.page_size)
        shape = (spec.num_layers, self.num_pages, *inner, spec.head_dim)
        with torch.inference_mode(False):  # a tensor born in inference mode could not be written outside it
            pages = torch.empty(shape, dtype=spec.dtype, device=spec.device)
        return pages if spec.device.type == "cpu" else pages.transpose(2, 3)

    def grown(self, num_pages: int) -> KVPool:
        """A pool of more pages, of which the first hold what this one's hold."""
        larger = KVPool(self.spec, num_pages, self.page_size)
        for mine, its in zip(self._layers, larger._layers, strict=True):
            its[:, : self.num_pages] = mine
        return larger

    @property
    def bytes(self) -> int:
        """Bytes that all pages take when full."""
        return self.num_pages * self.page_size * self.spec.bytes_per_token

    def k(self, layer: int) -> Tensor:
        """``[pages, page_size, kv_heads, head_dim]`` the keys of a layer: the pool itself, not a copy."""
        return self._k[self._check(layer)]

    def v(self, layer: int) -> Tensor:
        """``[pages, page_size, kv_heads, head_dim]`` the values of a layer: the pool itself, not a copy."""
        return self._v[self._check(layer)]

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64], source_pool: KVPool | None = None) -> None:
        """Copy the KV of slots ``source[i]`` to slots ``target[i]``, in this order, on the current stream.

        A target may be a source of those before it, not of those behind it.  The sources are slots of ``source_pool``,
        of the same page size; None: of this one.
        """
        at_once = max(1, 2**26 // self.spec.bytes_per_token)  # 64 MiB of them are in temporaries
        for begin in range(0, len(source), at_once):
            pairs = np.stack((source[begin : begin + at_once], target[begin : begin + at_once]))
            pages, offsets = self._pages_and_offsets(pairs)
            for its, mine in zip((self if source_pool is None else source_pool)._layers, self._layers, strict=True):
                mine[:, pages[1], offsets[1]] = its[:, pages[0], offsets[0]]

    def host_parts(self, tokens: int) -> list[Tensor]:
        """Host memory for the KV of ``tokens`` tokens: tensors ``[tokens, 2, layers, kv_heads, head_dim]`` of 32 MiB.

        That of a GPU's pool is pinned, which takes longer than copying to it; torch reuses freed memory for the next
        part of that size, so that it is pinned once.
        """
        spec = self.spec
        inner = (2, spec.num_layers, spec.kv_heads, spec.head_dim)
        counts = [min(self._at_once, tokens - begin) for begin in range(0, tokens, self._at_once)]
        with torch.inference_mode(False):
            return [
                torch.empty((count, *inner), dtype=spec.dtype, pin_memory=spec.device.type == "cuda")
                for count in counts
            ]

    def read(self, slots: NDArray[np.int64], into: list[Tensor] | None = None) -> list[Tensor]:
        """A copy of the keys and values of slots in host memory, in :meth:`host_parts`, which are the result."""
        parts, on_gpu = self.host_parts(len(slots)) if into is None else into, self.spec.device.type == "cuda"
        for index, part in enumerate(parts):
            pages, offsets = self._pages_and_offsets(slots[index * self._at_once : (index + 1) * self._at_once])
            kv = torch.stack([layers[:, pages, offsets] for layers in self._layers])
            # A link copies contiguous memory: the order of dimensions changes on the device.
            part.copy_(kv.movedim(2, 0).contiguous(), non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream(self.spec.device).synchronize()
        return parts

    def write(self, slots: NDArray[np.int64], parts: list[Tensor], tokens: NDArray[np.int64]) -> None:
        """Set the keys and values of ``slots[i]`` to those of token ``tokens[i]`` of parts as :meth:`read` gives them.

        All parts but the last have as many tokens.
        """
        if not len(slots):
            return
        part, within = np.divmod(tokens, len(parts[0]))
        bounds = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(slots)]
        for first, last in pairwise(bounds):
            for begin in range(first, last, self._at_once):
                end = min(begin + self._at_once, last)
                rows, kv = within[begin:end], parts[part[begin]]
                contiguous = bool((np.diff(rows) == 1).all())
                # A view of pinned memory is copied without the host waiting, or gathering it first.
                source = kv[int(rows[0]) : int(rows[-1]) + 1] if contiguous else kv[torch.from_numpy(rows)]
                uploaded = source.to(self.spec.device, non_blocking=contiguous)
                pages, offsets = self._pages_and_offsets(slots[begin:end])
                for layers, each in zip(self._layers, uploaded.unbind(1), strict=True):
                    layers[:, pages, offsets] = each.transpose(0, 1)

    @property
    def _at_once(self) -> int:
        """Tokens whose KV takes 32 MiB."""
        return max(1, 2**25 // self.spec.bytes_per_token)

    def _pages_and_offsets(self, slots: NDArray[np.int64]) -> list[Tensor]:
        """Pages and offsets of slots, on the device."""
        return upload([*np.divmod(slots, self.page_size)], self.spec.device)

    def _check(self, layer: int) -> int:
        if not 0 <= layer < self.spec.num_layers:
            raise IndexError(f"KVPool: layer {layer} of a pool for layers 0..{self.spec.num_layers - 1}")
        return layer


def free_memory(device: torch.device) -> int:
    """Bytes free on a device, torch's own spare ones included."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(spare)
    try:
        with open("/proc/meminfo") as meminfo:
            return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
