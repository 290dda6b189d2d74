"""The attention cores that are compared, each inside the same model and the same decode step.

A core lays KV out in the arena, appends a step's K and V to it, and attends.  ``installed`` puts one in the place of attention
over the tree in a patched model, for the length of a ``with`` block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.hydragen.cases import Case, TreeState
from benchmarks.runner import replay_us
from prefixkit.models.layer import CacheLayer
from prefixkit.ops.kv_pool import KVPool, KVSpec

# What the model's activations, logits, graphs and libraries take beside weights and KV.
RESERVE_BYTES = 12e9
CPU_BYTES = 1 << 24
ALIGN = 128
Attend = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class DoesNotFit(Exception):
    """A case's KV is larger than the arena; says both."""


class Arena:
    """Memory for all KV of a run: random numbers, made once, that each method lays out as it likes.

    :meth:`take` gives views of them, from the first on, until :meth:`reset`.
    """

    def __init__(self, elements: int, device: torch.device, dtype: torch.dtype) -> None:
        self.flat = torch.empty(elements, device=device, dtype=dtype).normal_()
        self._used = 0

    @staticmethod
    def of_free_memory(device: torch.device, dtype: torch.dtype, most: int | None = None) -> Arena:
        """All that is free but the reserve, or ``most`` bytes; on a CPU a little."""
        if device.type == "cpu":
            most = CPU_BYTES
        elif most is None:
            torch.cuda.empty_cache()
            most = max(int(torch.cuda.mem_get_info(device)[0] - RESERVE_BYTES), 0)
        return Arena(most // dtype.itemsize, device, dtype)

    def check(self, num_bytes: float) -> None:
        """Raise DoesNotFit unless so many bytes of KV fit."""
        capacity = self.flat.numel() * self.flat.element_size()
        if num_bytes > capacity:
            raise DoesNotFit(f"does not fit: KV of {num_bytes / 1e9:.1f} GB, room for {capacity / 1e9:.1f}")

    def reset(self) -> None:
        self._used = 0

    def take(self, *shape: int) -> Tensor:
        """The next numbers, in this shape."""
        count = math.prod(shape)
        begin, self._used = self._used, self._used + -(-count // ALIGN) * ALIGN
        self.check(self._used * self.flat.element_size())
        return self.flat[begin : begin + count].view(shape)


class ArenaPool(KVPool):
    """A pool whose pages lie in an arena."""

    def __init__(self, spec: KVSpec, num_pages: int, arena: Arena) -> None:
        self._arena = arena
        super().__init__(spec, num_pages, 16)

    def _pages(self) -> tuple[Tensor, ...]:
        spec = self.spec
        on_cpu = spec.device.type == "cpu"
        inner = (self.page_size, spec.kv_heads) if on_cpu else (spec.kv_heads, self.page_size)
        pages = self._arena.take(spec.num_layers, self.num_pages, *inner, spec.head_dim)
        layers = pages if on_cpu else pages.transpose(2, 3)
        return tuple(layers[layer] for layer in range(spec.num_layers))


class Core:
    """Attention of a decode step; this one does none: what is left is the ceiling.

    Attributes:
        chosen: What the core decided for the case, for the record.
        rotates: Where layers are compiled, it rotates queries and keys itself, by :meth:`rotary_append`.
    """

    rotates = False

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        self.state, self.spec, self.heads = state, spec, heads
        self.chosen: dict[str, str] = {}
        self.pool: KVPool = ArenaPool(spec, 1, arena)

    @classmethod
    def kv_bytes(cls, case: Case, bytes_per_token: int) -> int:
        """What it holds at the end of a case."""
        return 0

    def at(self, new: int) -> None:
        """Be ready for sequences of so many new tokens."""
        self.state.at(new)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take ``[batch, kv_heads, head_dim]`` of a layer."""

    def rotary_append(self, layer: int, q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate queries and keys, append keys and values, and return the queries."""
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """``[batch, heads, head_dim]`` to as much."""
        return q

    def installed(self) -> AbstractContextManager[None]:
        """A context in which a patched model attends by this core."""
        return _installed(self)


class Tree(Core):
    """prefixkit: KV in the pages of a tree, one launch a layer.  The patched model does that by itself."""

    rotates = True

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        super().__init__(state, spec, heads, arena)
        self.pool = ArenaPool(spec, int(state.snapshot.page_indptr[-1]), arena)

    @classmethod
    def kv_bytes(cls, case: Case, bytes_per_token: int) -> int:
        return case.tokens_held(None) * bytes_per_token

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.pool.append(layer, key, value, self.state.step.slots)

    def rotary_append(self, layer: int, q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pages = self.pool.k(layer), self.pool.v(layer)
        return torch.ops.prefixkit.rotary_append(q, key, value, cos, sin, *pages, self.state.step.slots)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        step, pages = self.state.step, (self.pool.k(layer), self.pool.v(layer))
        attention = torch.ops.prefixkit.tree_attention
        return attention(q, *pages, step.positions, step.plan, scale, "causal")[0]

    def installed(self) -> AbstractContextManager[None]:
        return nullcontext()


class Parts(Core):
    """Dense KV: ``levels`` of the case stored once and attended to by all below, everything else held by each sequence.

    No level: flash attention without sharing.  One: Hydragen.  More: Hydragen's hierarchy.
    """

    levels = 0

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        super().__init__(state, spec, heads, arena)
        case, size, layers = state.case, (spec.kv_heads, spec.head_dim), range(spec.num_layers)
        self.shared, own = case.levels[: self.levels], case.own(self.levels)
        self.level_kv = [
            [[arena.take(nodes, size[0], tokens, size[1]) for _ in "kv"] for nodes, tokens in self.shared]
            for _ in layers
        ]
        self.before = own - case.new
        self.own_kv = [[arena.take(case.batch, own, *size) for _ in "kv"] for _ in layers]
        self.private = Private(case.batch, own, spec.device)
        self._first = torch.arange(case.batch, device=spec.device) * own + self.before - 1
        self._slots = self._first + 1
        self._attend: list[Attend] = []

    @classmethod
    def kv_bytes(cls, case: Case, bytes_per_token: int) -> int:
        return case.tokens_held(cls.levels) * bytes_per_token

    def at(self, new: int) -> None:
        super().at(new)
        self.private.used.fill_(self.before + new)
        torch.add(self._first, new, out=self._slots)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        torch.ops.prefixkit.kv_append(key, value, *self.own_kv[layer], self._slots)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        if not self.shared:
            return self.private.alone(q, *self.own_kv[layer], scale)
        kv_heads, head_dim = self.spec.kv_heads, self.spec.head_dim
        # The query heads of a KV head together; without groups a view.
        grouped = q.view(len(q), kv_heads, self.heads // kv_heads, head_dim).transpose(0, 1)
        packed = grouped.reshape(kv_heads, -1, head_dim)
        parts, lses, rows_below = [], [], []
        for index, (nodes, _) in enumerate(self.shared):
            rows = packed.view(kv_heads, nodes, -1, head_dim).transpose(0, 1)
            out, lse = self._level(index)(rows, *self.level_kv[layer][index], scale)
            parts.append(out)
            lses.append(lse)
            rows_below.append(len(q) // nodes)
        out, lse = self.private(packed, *self.own_kv[layer], scale)
        return merge_parts([*parts, out], [*lses, lse], [*rows_below, 1], self.heads)

    def _level(self, index: int) -> Attend:
        """For each level the library that is fastest there."""
        kv_heads, head_dim, device = self.spec.kv_heads, self.spec.head_dim, self.spec.device
        rows = self.state.case.batch * self.heads // kv_heads
        for level, (nodes, tokens) in enumerate(self.shared if not self._attend else ()):
            q = torch.randn(nodes, kv_heads, rows // nodes, head_dim, device=device, dtype=self.spec.dtype)
            ways = level_attends(device)
            took = {name: _took(attend, q, *self.level_kv[0][level]) for name, attend in ways.items()}
            best = min(took, key=took.__getitem__)
            self._attend.append(ways[best])
            self.chosen[f"level of {nodes} x {tokens}"] = best
        return self._attend[index]


METHODS: dict[str, type[Core]] = {
    "none": Core,
    "flash": Parts,
    "hydragen": type("Hydragen", (Parts,), {"levels": 1}),
    "hydragen, two levels": type("HydragenTwo", (Parts,), {"levels": 2}),
    "ours": Tree,
}


def level_attends(device: torch.device) -> dict[str, Attend]:
    """Ways to attend to a level's nodes, by name."""
    if device.type == "cpu":
        return {"plain": plain}
    from benchmarks.tree_attention.rivals import cudnn, flash

    return {"flash": flash, "cudnn": cudnn}


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, beyond: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``[nodes, kv_heads, rows, head_dim]`` and its log-sum-exp, by matrix products: what a CPU gets.

    ``beyond`` says which tokens are none.
    """
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    scores = scores if beyond is None else scores.masked_fill(beyond, float("-inf"))
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def _took(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Microseconds of a call; infinity where it cannot run, 0 on a CPU."""
    try:
        return 0.0 if q.device.type == "cpu" else replay_us(lambda _: attend(q, k, v, 0.1), 1, repeats=3)
    except RuntimeError:
        return float("inf")


class Private:
    """Attention of ``batch`` queries to KV that only their sequences hold, at most ``capacity`` tokens each.

    Flash with lengths on the device: ``used [batch]`` int32 tokens that each holds.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        self.batch, self.capacity = batch, capacity
        self.used = torch.ones(batch, dtype=torch.int32, device=device)
        self._count = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._begin_k = self._count * capacity
        self._begin_q: dict[int, Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: ``[kv_heads, batch * group, head_dim]``.
            k, v: ``[batch, capacity, kv_heads, head_dim]``.

        Returns:
            ``[batch, kv_heads, group, head_dim]`` and log-sum-exp ``[batch, kv_heads, group]``, of any strides.
        """
        kv_heads, rows, head_dim = q.shape
        group = rows // self.batch
        if q.device.type == "cpu":
            return self._on_cpu(q.view(kv_heads, self.batch, group, head_dim).transpose(0, 1), k, v, scale)
        if group not in self._begin_q:
            self._begin_q[group] = self._count * group
        out, lse = self._flash(q.transpose(0, 1), k, v, self._begin_q[group], group, scale)
        out = out.view(self.batch, group, kv_heads, head_dim).transpose(1, 2)
        return out, lse.view(kv_heads, self.batch, group).transpose(0, 1)

    def alone(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The same where there is nothing to merge: ``q [batch, heads, head_dim]`` to as much.

        Flash packs the query heads of a KV head itself then, and splits long KV.
        """
        if q.device.type == "cpu":
            grouped = q.view(self.batch, k.shape[2], -1, q.shape[2])
            return self._on_cpu(grouped, k, v, scale)[0].reshape(q.shape)
        return self._flash(q, k, v, self._count, 1, scale)[0]

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, begin: Tensor, most: int, scale: float) -> tuple[Tensor, Tensor]:
        indptr, longest = (begin, self._begin_k), (most, self.capacity)
        flat, options = (k.flatten(0, 1), v.flatten(0, 1)), {"scale": scale, "seqused_k": self.used}
        found = torch.ops.aten._flash_attention_forward(q, *flat, *indptr, *longest, 0.0, False, False, **options)
        return found[0], found[1]

    def _on_cpu(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        beyond = torch.arange(self.capacity) >= self.used[:, None]
        return plain(q, k.transpose(1, 2), v.transpose(1, 2), scale, beyond[:, None, None])


def merge_parts(parts: list[Tensor], lses: list[Tensor], rows_per_node: list[int], heads: int) -> Tensor:
    """``[rows, heads, head_dim]`` of all parts: one fused kernel, or plain torch on a CPU; see ``merge.merge``."""
    if parts[0].device.type != "cpu":
        from benchmarks.tree_attention.merge import merge

        return merge(parts, lses, rows_per_node, heads)
    outs, weights = [], []
    for part, lse, rows in zip(parts, lses, rows_per_node, strict=True):
        nodes, kv_heads, _, head_dim = part.shape
        outs.append(part.reshape(nodes, kv_heads, rows, -1, head_dim).transpose(1, 2).reshape(-1, heads, head_dim))
        weights.append(lse.reshape(nodes, kv_heads, rows, -1).transpose(1, 2).reshape(-1, heads))
    share = torch.stack(weights).softmax(0)[..., None]
    return (torch.stack(outs).float() * share).sum(0).to(parts[0].dtype)


@contextmanager
def _installed(core: Core) -> Iterator[None]:
    def update(self: CacheLayer, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        core.append(self.index, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self.appended = True
        return key, value

    def attend(self: CacheLayer, query: Tensor, scale: float, *variant: object) -> Tensor:
        self.cache.attended[self.index] += 1
        return core.attend(self.index, query[0].transpose(0, 1), scale)[None]

    before = CacheLayer.update, CacheLayer.attend
    CacheLayer.update, CacheLayer.attend = update, attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        CacheLayer.update, CacheLayer.attend = before  # type: ignore[method-assign]
