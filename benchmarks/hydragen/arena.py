"""One piece of memory for all KV of a run: random numbers, made once, that each method lays out as it likes."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkit.ops.kv_pool import KVPool, KVSpec

# What the model's activations, logits, graphs and libraries take beside weights and KV.
RESERVE_BYTES = 12e9
CPU_BYTES = 1 << 24
ALIGN = 128


class DoesNotFit(Exception):
    """A case's KV is larger than what there is room for; says both."""


class Arena:
    """``elements`` random numbers; :meth:`take` gives views of them, from the first on, until :meth:`reset`."""

    def __init__(self, elements: int, device: torch.device, dtype: torch.dtype) -> None:
        self.flat = torch.empty(elements, device=device, dtype=dtype).normal_()
        self._used = 0

    @staticmethod
    def of_free_memory(device: torch.device, dtype: torch.dtype, most: int | None = None) -> Arena:
        """All that is free but the reserve, or ``most`` bytes; on a CPU a little."""
        if device.type == "cpu":
            room = CPU_BYTES
        elif most is None:
            torch.cuda.empty_cache()
            room = max(int(torch.cuda.mem_get_info(device)[0] - RESERVE_BYTES), 0)
        else:
            room = most
        return Arena(room // dtype.itemsize, device, dtype)

    def check(self, num_bytes: float) -> None:
        """Raise DoesNotFit unless so many bytes of KV have room."""
        room = self.flat.numel() * self.flat.element_size()
        if num_bytes > room:
            raise DoesNotFit(f"does not fit: KV of {num_bytes / 1e9:.1f} GB, room for {room / 1e9:.1f}")

    def reset(self) -> None:
        self._used = 0

    def take(self, *shape: int) -> Tensor:
        """The next numbers, in this shape."""
        count = 1
        for size in shape:
            count *= size
        begin, self._used = self._used, self._used + -(-count // ALIGN) * ALIGN
        self.check(self._used * self.flat.element_size())
        return self.flat[begin : begin + count].view(shape)


class ArenaPool(KVPool):
    """A pool whose pages lie in an arena."""

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int, arena: Arena) -> None:
        self._arena = arena
        super().__init__(spec, num_pages, page_size)

    def _pages(self) -> tuple[Tensor, ...]:
        spec = self.spec
        on_cpu = spec.device.type == "cpu"
        inner = (self.page_size, spec.kv_heads) if on_cpu else (spec.kv_heads, self.page_size)
        pages = self._arena.take(spec.num_layers, self.num_pages, *inner, spec.head_dim)
        layers = pages if on_cpu else pages.transpose(2, 3)
        return tuple(layers[layer] for layer in range(spec.num_layers))
