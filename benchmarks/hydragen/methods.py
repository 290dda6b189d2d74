"""The attention cores that are compared: each lays KV out in the arena, appends a step's K and V to it, and attends."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.hydragen.cases import Case, TreeState
from benchmarks.runner import replay_us
from benchmarks.tree_attention.rivals import Attend, attend_levels, cudnn, flash
from benchmarks.tree_attention.workloads import PAGE
from prefixkit.models.step_cache import CacheLayer
from prefixkit.ops.kv_pool import KVPool, KVSpec

RESERVE_BYTES = 12e9  # what the model's activations, logits, graphs and libraries take beside weights and KV
CPU_BYTES = 1 << 24


class DoesNotFit(Exception):
    """A case's KV is larger than the arena; says both."""


class Arena:
    """Random numbers for all KV of a run: ``num_bytes`` or what is free; views of them until :meth:`reset`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_bytes: int | None = None) -> None:
        if num_bytes is None and device.type == "cpu":
            num_bytes = CPU_BYTES
        elif num_bytes is None:
            torch.cuda.empty_cache()
            num_bytes = max(int(torch.cuda.mem_get_info(device)[0] - RESERVE_BYTES), 0)
        self.flat = torch.empty(num_bytes // dtype.itemsize, device=device, dtype=dtype).normal_()
        self.reset()

    def check(self, num_bytes: float) -> None:
        """Raise DoesNotFit unless so many bytes of KV fit."""
        if num_bytes > self.flat.nbytes:
            capacity = self.flat.nbytes / 1e9
            raise DoesNotFit(f"does not fit: KV of {num_bytes / 1e9:.1f} GB, capacity {capacity:.1f} GB")

    def reset(self) -> None:
        self._used = 0

    def take(self, *shape: int) -> Tensor:
        """The next numbers, in this shape."""
        count = math.prod(shape)
        begin, self._used = self._used, self._used + -(-count // 128) * 128  # aligned
        self.check(self._used * self.flat.itemsize)
        return self.flat[begin : begin + count].view(shape)


class ArenaPool(KVPool):
    """A pool whose pages are in an arena."""

    def __init__(self, spec: KVSpec, num_pages: int, arena: Arena) -> None:
        self._arena = arena
        super().__init__(spec, num_pages, PAGE)

    def _pages(self) -> tuple[Tensor, ...]:
        spec, on_cpu = self.spec, self.spec.device.type == "cpu"
        inner = (PAGE, spec.kv_heads) if on_cpu else (spec.kv_heads, PAGE)
        pages = self._arena.take(spec.num_layers, self.num_pages, *inner, spec.head_dim)
        return (pages if on_cpu else pages.transpose(2, 3)).unbind()


class Core:
    """Attention of a decode step; this one does none: what is left is the ceiling."""

    rotates = False  # whether rotary_append takes queries and keys that are not rotated, where layers are compiled
    levels: int | None = None  # of the case that are stored once; None: all, in a tree's pages

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        self.state, self.spec, self.heads = state, spec, heads
        self.chosen: dict[str, str] = {}  # what it decided for the case, for the record
        self.pool: KVPool = ArenaPool(spec, 1, arena)

    @classmethod
    def kv_bytes(cls, case: Case, bytes_per_token: int) -> int:
        """What it holds at the end of a case; one that attends to nothing, nothing."""
        return 0 if cls is Core else case.tokens_held(cls.levels) * bytes_per_token

    def at(self, new: int) -> None:
        """Be ready for sequences of so many new tokens."""
        self.state.at(new)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take ``[batch, kv_heads, head_dim]`` of a layer."""

    def rotary_append(self, layer: int, q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate queries and keys if it ``rotates``, append keys and values, and return the queries."""
        self.append(layer, key, value)
        return q

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """``[batch, heads, head_dim]`` to as much."""
        return q

    def installed(self) -> AbstractContextManager[Any]:
        """A context in which a patched model attends by this core, not over the tree."""

        def update(cached: CacheLayer, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.append(cached.index, key[0].transpose(0, 1), value[0].transpose(0, 1))
            cached.appended = True
            return key, value

        def attend(cached: CacheLayer, query: Tensor, scale: float, *variant: object) -> Tensor:
            cached.cache.attended[cached.index] += 1
            return self.attend(cached.index, query[0].transpose(0, 1), scale)[None]

        return mock.patch.multiple(CacheLayer, update=update, attend=attend)


class Tree(Core):
    """prefixkit: KV in the pages of a tree, one launch a layer.  The patched model does that by itself."""

    rotates = True

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        super().__init__(state, spec, heads, arena)
        self.pool = ArenaPool(spec, int(state.snapshot.page_indptr[-1]), arena)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        pages = self.pool.k(layer), self.pool.v(layer)
        torch.ops.prefixkit.kv_append(key, value, *pages, self.state.step.slots)

    def rotary_append(self, layer: int, q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pages = self.pool.k(layer), self.pool.v(layer)
        return torch.ops.prefixkit.rotary_append(q, key, value, cos, sin, *pages, self.state.step.slots)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        step, pages = self.state.step, (self.pool.k(layer), self.pool.v(layer))
        return torch.ops.prefixkit.tree_attention(q, *pages, step.positions, step.plan, scale, "causal")[0]

    def installed(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Parts(Core):
    """Dense KV: ``levels`` of the case stored once and attended to by all below, the rest held by each sequence."""

    levels = 0  # flash attention without sharing; 1: Hydragen; more: Hydragen's hierarchy

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        super().__init__(state, spec, heads, arena)
        case, layers, device = state.case, range(spec.num_layers), spec.device
        shared, self._own = case.levels[: self.levels], case.own(self.levels)
        sizes = [(nodes, spec.kv_heads, tokens, spec.head_dim) for nodes, tokens in shared]
        self.level_kv = [[[arena.take(*size) for _ in "kv"] for size in sizes] for _ in layers]
        own = case.batch, self._own, spec.kv_heads, spec.head_dim
        self.own_kv = [[arena.take(*own) for _ in "kv"] for _ in layers]
        self._group, self._before = heads // spec.kv_heads, self._own - case.new
        self._below = [case.batch // nodes for nodes, _ in shared]
        # Of each sequence: tokens that it holds (int32), where its KV and its queries begin, its last token's slot.
        count = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
        self._used, self._begin_k = torch.ones_like(count[1:]), count * self._own
        self._begin_q = {rows: count * rows for rows in (1, self._group)}
        self._first = torch.arange(case.batch, device=device) * self._own + self._before - 1
        self._slots = self._first + 1
        self._attends = [self._fastest(nodes, *kv) for (nodes, _), kv in zip(shared, self.level_kv[0], strict=True)]

    def at(self, new: int) -> None:
        super().at(new)
        self._used.fill_(self._before + new)
        torch.add(self._first, new, out=self._slots)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        torch.ops.prefixkit.kv_append(key, value, *self.own_kv[layer], self._slots)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        k, v = self.own_kv[layer]
        on_cpu, (batch, _, head_dim), kv_heads = q.device.type == "cpu", q.shape, self.spec.kv_heads
        if not self.levels and not on_cpu:  # flash packs the query heads of a KV head itself, and splits long KV
            return self._flash(q, k, v, 1, scale)[0]
        # The query heads of a KV head together; without groups a view.
        packed = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        parts = attend_levels(packed, self.level_kv[layer], self._attends, scale)
        if on_cpu:
            beyond = (torch.arange(self._own) >= self._used[:, None])[:, None, None]
            grouped = packed.view(kv_heads, batch, -1, head_dim).transpose(0, 1)
            parts.append(plain(grouped, k.transpose(1, 2), v.transpose(1, 2), scale, beyond))
        else:
            out, lse = self._flash(packed.transpose(0, 1), k, v, self._group, scale)
            out = out.view(batch, -1, kv_heads, head_dim).transpose(1, 2)
            parts.append((out, lse.view(kv_heads, batch, -1).transpose(0, 1)))
        outs, lses = (list(of) for of in zip(*parts, strict=True))
        return merge_parts(outs, lses, [*self._below, 1], self.heads)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, rows: int, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of ``rows`` rows of each sequence to its own KV, whose lengths are on the device."""
        indptr, longest = (self._begin_q[rows], self._begin_k), (rows, self._own)
        flat, options = (k.flatten(0, 1), v.flatten(0, 1)), {"scale": scale, "seqused_k": self._used}
        return torch.ops.aten._flash_attention_forward(q, *flat, *indptr, *longest, 0.0, False, False, **options)[:2]

    def _fastest(self, nodes: int, k: Tensor, v: Tensor) -> Attend:
        """The library that is fastest on a level; plain matrix products on a CPU."""
        ways = {"plain": plain} if k.device.type == "cpu" else {"flash": flash, "cudnn": cudnn}
        rows = self.state.case.batch * self._group // nodes
        q = torch.randn(nodes, len(k[0]), rows, k.shape[-1], device=k.device, dtype=k.dtype)

        def us(name: str) -> float:
            try:
                return replay_us(lambda _: ways[name](q, k, v, 0.1), repeats=3)
            except RuntimeError:  # it cannot run
                return math.inf

        best = min(ways, key=us) if len(ways) > 1 else "plain"
        self.chosen[f"level of {nodes} x {k.shape[2]}"] = best
        return ways[best]


METHODS: dict[str, type[Core]] = {
    "none": Core,
    "flash": Parts,
    "hydragen": type("Hydragen", (Parts,), {"levels": 1}),
    "hydragen, two levels": type("HydragenTwo", (Parts,), {"levels": 2}),
    "ours": Tree,
}


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, beyond: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``[nodes, kv_heads, rows, head_dim]`` and log-sum-exp, by matrix products, without tokens that are ``beyond``."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    scores = scores if beyond is None else scores.masked_fill(beyond, float("-inf"))
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def merge_parts(parts: list[Tensor], lses: list[Tensor], rows_per_node: list[int], heads: int) -> Tensor:
    """``[rows, heads, head_dim]`` of all parts: one fused kernel, or plain torch on a CPU; see ``merge.merge``."""
    if parts[0].device.type != "cpu":
        from benchmarks.tree_attention.merge import merge

        return merge(parts, lses, rows_per_node, heads)

    def by_row(part: Tensor, rows: int) -> Tensor:
        return part.unflatten(2, (rows, -1)).transpose(1, 2).reshape(-1, heads, part.shape[-1])

    outs = [by_row(part, rows) for part, rows in zip(parts, rows_per_node, strict=True)]
    weights = [by_row(lse[..., None], rows) for lse, rows in zip(lses, rows_per_node, strict=True)]
    return (torch.stack(outs).float() * torch.stack(weights).softmax(0)).sum(0).to(parts[0].dtype)
