"""The page tensors that hold what layers cache: K and V, or latents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.gpu.staging import upload
from prefixkit.kv.device_memory import free_for
from prefixkit.kv.layer_kinds import CachedTensor
from prefixkit.kv.state_pool import StatePool, States
from prefixkit.ops import library as ops  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.ops.arguments import FP8, STORED


@dataclass(frozen=True)
class KVSpec:
    """What a model caches for one token.

    Attributes:
        layers: For each layer that caches anything, its tensors: K and V, or a latent and rotary keys.
        dtype: float32, bfloat16, float16 or float8_e4m3fn.
        device: Where the first layer's pages live, and where a step's tensors are made.
        states: The states that modules keep for a sequence in place of KV, independent of its length.
        computed: The dtype in which attention computes; None: the pages' dtype, or bfloat16 if the pages hold e4m3.
        layer_devices, state_devices: Where each of ``layers``, and each module of ``states``, keeps what it caches;
            empty if all of them lie on ``device``.

    Raises:
        ValueError: no layers, or an unsupported dtype.
    """

    layers: tuple[tuple[CachedTensor, ...], ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    states: States = ()
    computed: torch.dtype | None = None
    layer_devices: tuple[torch.device, ...] = ()
    state_devices: tuple[torch.device, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or not all(sum(tensor.size for tensor in cached) for cached in self.layers):
            raise ValueError(f"KVSpec: layers must each cache a tensor, and be at least one, got {self.layers}")
        if self.dtype not in STORED:
            raise ValueError(f"KVSpec: dtype must be one of {', '.join(map(str, STORED))}, got {self.dtype!r}")
        object.__setattr__(self, "device", torch.device(self.device))
        for name, of in (("layer_devices", self.layers), ("state_devices", self.states)):
            if len(getattr(self, name)) not in (0, len(of)):
                raise ValueError(f"KVSpec: {name} must be {len(of)} devices or none, got {len(getattr(self, name))}")
        if {self.device}.issuperset((*self.layer_devices, *self.state_devices)):
            object.__setattr__(self, "layer_devices", ())
            object.__setattr__(self, "state_devices", ())

    @cached_property
    def shares(self) -> dict[torch.device, float]:
        """The devices, and for each the larger of its shares of the KV's and of the states' bytes."""
        if not (self.layer_devices or self.state_devices):
            return {self.device: 1.0}
        sizes = [sum(tensor.size for tensor in cached) for cached in self.layers]
        of_states = [sum(tensor.bytes for tensor in module) for module in self.states]
        found = dict[torch.device, float]()
        for places, bytes_of in ((self.layer_devices, sizes), (self.state_devices, of_states)):
            own = Counter[torch.device]()
            for place, size in zip(places or [self.device] * len(bytes_of), bytes_of, strict=True):
                own[place] += size
            found |= {place: max(found.get(place, 0.0), size / own.total()) for place, size in own.items() if size}
        return found

    @property
    def places(self) -> str:
        """A text that names the devices."""
        return " and ".join(map(str, self.shares))

    @cached_property
    def tensors(self) -> dict[tuple[CachedTensor, ...], list[int]]:
        """The numbers of the layers that cache tensors of the same sizes, by these tensors."""
        found: dict[tuple[CachedTensor, ...], list[int]] = {}
        for index, cached in enumerate(self.layers):
            found.setdefault(cached, []).append(index)
        return found

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of queries, and of K and V before they are cached."""
        return self.computed or (torch.bfloat16 if self.dtype == FP8 else self.dtype)

    @property
    def moved_dtype(self) -> torch.dtype:
        """The dtype in which torch copies pages: uint8 for e4m3, which not all of torch's copy operations support."""
        return torch.uint8 if self.dtype == FP8 else self.dtype

    @cached_property
    def size(self) -> int:
        """Elements cached for one token in all layers."""
        return sum(tensor.size for cached in self.layers for tensor in cached)

    @property
    def bytes_per_token(self) -> int:
        """Bytes cached for one token in all layers."""
        return self.size * self.dtype.itemsize

    @property
    def kinds(self) -> str:
        """A text that says how many layers cache tensors of which sizes."""
        found = (f"{len(at)} layers of {' and '.join(map(str, cached))}" for cached, at in self.tensors.items())
        return ", ".join(found)

    @property
    def state_kinds(self) -> str:
        """A text that says how many modules keep which states; empty if none does."""
        found = Counter(" and ".join(map(str, module)) for module in self.states)
        return ", ".join(f"{count} modules of {states}" for states, count in found.items())

    def __str__(self) -> str:
        states = f", states of {len(self.states)} modules" if self.states else ""
        return f"{self.kinds}, {self.dtype} on {self.places}{states}"

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one sequence's state in all modules that keep one."""
        return sum(tensor.bytes for module in self.states for tensor in module)


class KVPoolTooLarge(ValueError):
    """The device has too little free memory for a pool's pages."""


class KVPool:
    """Pages that hold what all layers cache, addressed by slot: ``slot = page * page_size + offset``.

    Layers that cache tensors of the same sizes on the same device share one page tensor per cached tensor, and a page
    has the same number in all layers.  Memory is allocated at once but not touched before it is written, so the
    operating system commits it as tokens are appended.  On the CPU the heads of a token are adjacent and tokens follow
    each other, so that consecutive slots form one matrix; on a GPU a page stores one head after the other.

    Attributes:
        spec: What is cached for each token.
        num_pages, page_size: The number of pages, and the tokens per page.
        states: The pool of states, for layers that keep a state in place of KV; empty at first.

    Raises:
        ValueError: fewer than one page, or a page size outside 1 to 128.
        KVPoolTooLarge: the device does not have enough free memory.
    """

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int = 16) -> None:
        if num_pages < 1:
            raise ValueError(f"KVPool: num_pages must be at least 1, got {num_pages}")
        if not 1 <= page_size <= 128:
            raise ValueError(f"KVPool: page_size must be 1 to 128 tokens, got {page_size}")
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.states = StatePool(spec.states, spec.state_devices or (spec.device,) * len(spec.states))
        self._tensors = list[Tensor]()
        self._columns = list[int]()  # the first element of each tensor in a token's row of :meth:`split`
        self._layers = dict[int, tuple[Tensor, ...]]()
        try:
            self._allocate()
        except RuntimeError as error:  # torch's OutOfMemoryError is a RuntimeError
            free = free_for(spec.shares) / 2**30
            raise KVPoolTooLarge(
                f"KV for {num_pages * page_size} tokens takes {self.bytes / 2**30:.1f} GiB, which {spec.places} cannot "
                f"give ({free:.1f} GiB are free); lower kv_budget, or num_pages of kv_pool"
            ) from error

    def _allocate(self) -> None:
        """Make the page tensors, for each kind of layers one after another those of a run of layers on one device."""
        spec, column = self.spec, 0
        devices = spec.layer_devices or (spec.device,) * len(spec.layers)
        for cached, at in spec.tensors.items():
            before = 0
            for device, run in groupby(at, key=devices.__getitem__):
                numbers, begin, views = list(run), column, list[Tensor]()
                for tensor in cached:
                    pages = self._pages(tensor, len(numbers), device)
                    self._tensors.append(pages)
                    self._columns.append(begin + before * tensor.size)
                    begin += len(at) * tensor.size
                    with torch.inference_mode(False):
                        views.append(pages if pages.dtype == spec.dtype else pages.view(spec.dtype))
                self._layers |= zip(numbers, zip(*views, strict=True), strict=True)
                before += len(numbers)
            column += len(at) * sum(tensor.size for tensor in cached)

    def _pages(self, tensor: CachedTensor, layers: int, device: torch.device) -> Tensor:
        """``[layers, num_pages, page_size, heads, head_dim]``."""
        on_cpu = device.type == "cpu"
        inner = (self.page_size, tensor.heads) if on_cpu else (tensor.heads, self.page_size)
        shape = (layers, self.num_pages, *inner, tensor.head_dim)
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside it
            pages = torch.empty(shape, dtype=self.spec.moved_dtype, device=device)
        return pages if on_cpu else pages.transpose(2, 3)

    def __repr__(self) -> str:
        return f"KVPool({self.num_pages} pages of {self.page_size} tokens, {self.spec})"

    def grown(self, num_pages: int) -> KVPool:
        """A pool of ``num_pages`` pages, the first of which hold copies of this pool's pages."""
        larger = KVPool(self.spec, num_pages, self.page_size)
        for mine, its in zip(self._tensors, larger._tensors, strict=True):
            its[:, : self.num_pages] = mine
        larger.states = self.states
        return larger

    @property
    def bytes(self) -> int:
        """Bytes of all pages, when full, and of all states."""
        return self.num_pages * self.page_size * self.spec.bytes_per_token + self.states.bytes

    def pages(self, layer: int) -> tuple[Tensor, ...]:
        """The page tensors of a layer, ``[pages, page_size, heads, head_dim]`` each, not copied; IndexError if the pool
        has no such layer.
        """
        if layer not in self._layers:
            raise IndexError(f"KVPool: layer {layer} of a pool for layers 0..{len(self._layers) - 1}")
        return self._layers[layer]

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64], source_pool: KVPool | None = None) -> None:
        """Copy what is cached in slots ``source[i]`` to slots ``target[i]``, ``[count]`` int64 each, in order, on the
        current stream of each device.

        A target may be the source of an earlier copy, not of a later one.  The sources are slots of ``source_pool``,
        which has the same page size; None: of this pool.
        """
        at_once = max(1, 2**26 // self.spec.bytes_per_token)  # tokens of 64 MiB: the temporaries
        for begin in range(0, len(source), at_once):
            pairs = np.stack((source[begin : begin + at_once], target[begin : begin + at_once]))
            places = self._pages_and_offsets(pairs)
            for its, mine in zip((self if source_pool is None else source_pool)._tensors, self._tensors, strict=True):
                pages, offsets = places[mine.device]
                mine[:, pages[1], offsets[1]] = its[:, pages[0], offsets[0]]

    def host_parts(self, tokens: int) -> list[Tensor]:
        """Host memory for what is cached of ``tokens`` tokens: tensors ``[tokens, spec.size]`` of 32 MiB,
        in ``spec.moved_dtype``.

        For a pool on a GPU the memory is pinned.  Pinning takes longer than copying, but torch reuses freed pinned
        memory for the next part of the same size, so it is pinned once.
        """
        spec = self.spec
        counts = [min(self._at_once, tokens - begin) for begin in range(0, tokens, self._at_once)]
        with torch.inference_mode(False):
            return [
                torch.empty((count, spec.size), dtype=spec.moved_dtype, pin_memory=spec.device.type == "cuda")
                for count in counts
            ]

    def split(self, part: Tensor) -> list[Tensor]:
        """Views ``[tokens, layers, heads, head_dim]`` of ``part [tokens, spec.size]``, in ``spec.moved_dtype``: one for
        each page tensor that layers share, in order.  A token's elements have the same order on any devices.
        """
        shapes = [(tensor.shape[0], *tensor.shape[3:]) for tensor in self._tensors]
        columns = zip(self._columns, shapes, strict=True)
        return [torch.unflatten(part[:, at : at + prod(shape)], 1, shape) for at, shape in columns]

    def read(self, slots: NDArray[np.int64], into: list[Tensor] | None = None) -> list[Tensor]:
        """Copy what is cached in slots to host memory.

        Args:
            slots: ``[tokens]`` int64.
            into: The target, from :meth:`host_parts`; None: allocated here.

        Returns:
            The parts, ``[tokens, spec.size]`` each in ``spec.moved_dtype``.
        """
        parts, device = self.host_parts(len(slots)) if into is None else into, self.spec.device
        # A transfer between host and device needs contiguous memory, so dimensions are reordered on the device, if it
        # is one; torch transfers parts of rows from several devices through memory of its own, and waits for each.
        directly = device.type == "cpu" or len(self.spec.shares) > 1
        for index, part in enumerate(parts):
            places = self._pages_and_offsets(slots[index * self._at_once : (index + 1) * self._at_once])
            there = part if directly else torch.empty(part.shape, dtype=part.dtype, device=device)
            for tensor, view in zip(self._tensors, self.split(there), strict=True):
                pages, offsets = places[tensor.device]
                view.copy_(tensor[:, pages, offsets].movedim(1, 0))
            if there is not part:
                part.copy_(there, non_blocking=device.type == "cuda")
        if device.type == "cuda" and not directly:
            torch.cuda.current_stream(device).synchronize()
        return parts

    def write(self, slots: NDArray[np.int64], parts: Sequence[Tensor], tokens: NDArray[np.int64]) -> None:
        """Write what was cached of token ``tokens[i]``, from parts as :meth:`read` returns them, to ``slots[i]``.

        Args:
            slots: ``[count]`` int64.
            parts: ``[tokens, spec.size]`` each in the pool's dtype; all but the last have as many tokens.
            tokens: ``[count]`` int64 indices into all parts laid end to end.
        """
        if not len(slots):
            return
        part, within = np.divmod(tokens, len(parts[0]))
        bounds = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(slots)]
        for first, last in pairwise(bounds):
            for begin in range(first, last, self._at_once):
                end = min(begin + self._at_once, last)
                rows, kv = within[begin:end], parts[part[begin]].view(self.spec.moved_dtype)
                contiguous = bool((np.diff(rows) == 1).all())
                # The host neither gathers a view of pinned memory nor waits for its copy.
                source = kv[int(rows[0]) : int(rows[-1]) + 1] if contiguous else kv[torch.from_numpy(rows)]
                places = self._pages_and_offsets(slots[begin:end])
                if len(places) == 1:
                    source = source.to(self.spec.device, non_blocking=contiguous)
                for tensor, each in zip(self._tensors, self.split(source), strict=True):
                    pages, offsets = places[tensor.device]
                    tensor[:, pages, offsets] = each.to(tensor.device).transpose(0, 1)

    @property
    def _at_once(self) -> int:
        """Tokens whose KV takes 32 MiB."""
        return max(1, 2**25 // self.spec.bytes_per_token)

    def _pages_and_offsets(self, slots: NDArray[np.int64]) -> dict[torch.device, list[Tensor]]:
        """Page numbers of slots and offsets in these pages, on each device."""
        arrays = np.divmod(slots, self.page_size)
        return {device: upload(arrays, device) for device in {tensor.device: None for tensor in self._tensors}}
