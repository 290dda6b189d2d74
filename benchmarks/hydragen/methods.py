"""The attention cores that are compared, each inside the same model and the same decode step.

A core lays KV out in the arena, appends a step's K and V to it, and attends.  :func:`installed` puts one in the place of
attention over the tree in a patched model, for the length of a ``with`` block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.hydragen.arena import Arena, ArenaPool
from benchmarks.hydragen.cases import Case
from benchmarks.hydragen.parts import Attend, Private, level_attends, merge_parts
from benchmarks.hydragen.tree_state import TreeState
from prefixkit.models.layer import CacheLayer
from prefixkit.ops.kv_pool import KVPool, KVSpec


class Core:
    """Attention of a decode step; this one does none: what is left is the ceiling.

    Attributes:
        chosen: What the core decided for the case, for the record.
        rotates: Where layers are compiled, it turns queries and keys itself, by :meth:`rotary_append`.
    """

    rotates = False

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        self.state, self.spec, self.heads = state, spec, heads
        self.chosen: dict[str, str] = {}
        self.pool: KVPool = _pages(spec, 1, arena)

    @staticmethod
    def kv_bytes(case: Case, bytes_per_token: int) -> int:
        """What it holds at the end of a case."""
        return 0

    def at(self, drawn: int) -> None:
        """Be ready for sequences that have drawn so many tokens."""
        self.state.at(drawn)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take ``[batch, kv_heads, head_dim]`` of a layer."""

    def rotary_append(self, layer: int, q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn queries and keys, append keys and values, and return the queries."""
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """``[batch, heads, head_dim]`` to as much."""
        return q

    def installed(self) -> Any:
        """A context in which a patched model attends by this core."""
        return _installed(self)


class Tree(Core):
    """prefixkit: KV in the pages of a tree, one launch a layer.  The patched model does that by itself."""

    rotates = True

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        super().__init__(state, spec, heads, arena)
        self.pool = _pages(spec, int(state.tree.snapshot.page_indptr[-1]), arena)

    @staticmethod
    def kv_bytes(case: Case, bytes_per_token: int) -> int:
        return case.tokens_held(None) * bytes_per_token

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.pool.append(layer, key, value, self.state.step.slots)

    def rotary_append(self, layer: int, q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = torch.ops.prefixkit.rotary_append(
            q, key, value, cos, sin, self.pool.k(layer), self.pool.v(layer), self.state.step.slots
        )
        return rotated

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        step = self.state.step
        out: Tensor = torch.ops.prefixkit.tree_attention(
            q, self.pool.k(layer), self.pool.v(layer), step.positions, step.work, step.nodes, scale, "causal"
        )[0]
        return out

    def installed(self) -> Any:
        return nullcontext()


class Parts(Core):
    """Dense KV: ``levels`` of the case stored once and attended to by all below, everything else held by each sequence.

    No level: flash attention without sharing.  One: Hydragen.  More: Hydragen's hierarchy.
    """

    levels = 0

    def __init__(self, state: TreeState, spec: KVSpec, heads: int, arena: Arena) -> None:
        super().__init__(state, spec, heads, arena)
        case, size = state.case, (spec.kv_heads, spec.head_dim)
        self.shared = case.levels[: self.levels]
        self.level_kv = [
            [[arena.take(nodes, size[0], tokens, size[1]) for _ in "kv"] for nodes, tokens in self.shared]
            for _ in range(spec.num_layers)
        ]
        self.before = case.own(self.levels) - case.new
        self.room = case.own(self.levels)
        self.own_kv = [[arena.take(case.batch, self.room, *size) for _ in "kv"] for _ in range(spec.num_layers)]
        self.private = Private(case.batch, self.room, spec.device)
        self._first = torch.arange(case.batch, device=spec.device) * self.room + self.before - 1
        self._slots = self._first + 1
        self._attend: list[Attend] = []

    @classmethod
    def kv_bytes(cls, case: Case, bytes_per_token: int) -> int:
        return case.tokens_held(cls.levels) * bytes_per_token

    def at(self, drawn: int) -> None:
        super().at(drawn)
        self.private.used.fill_(self.before + drawn)
        torch.add(self._first, drawn, out=self._slots)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        torch.ops.prefixkit.kv_append(key, value, *self.own_kv[layer], self._slots)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        if not self.shared:
            return self.private.alone(q, *self.own_kv[layer], scale)
        kv_heads, head_dim = self.spec.kv_heads, self.spec.head_dim
        group = self.heads // kv_heads
        # The query heads of a KV head together; without groups a view.
        packed = q.view(len(q), kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
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
        if not self._attend:
            self._choose()
        return self._attend[index]

    def _choose(self) -> None:
        """For each level the library that is fastest there."""
        kv_heads, head_dim, device = self.spec.kv_heads, self.spec.head_dim, self.spec.device
        rows = self.state.case.batch * self.heads // kv_heads
        for index, (nodes, tokens) in enumerate(self.shared):
            q = torch.randn(nodes, kv_heads, rows // nodes, head_dim, device=device, dtype=self.spec.dtype)
            ways = level_attends(device)
            took = {name: _took(attend, q, *self.level_kv[0][index]) for name, attend in ways.items()}
            best = min(took, key=took.__getitem__)
            self._attend.append(ways[best])
            self.chosen[f"level of {nodes} x {tokens}"] = best


class Flash(Parts):
    """No sharing: each sequence's KV in full."""


class Hydragen(Parts):
    """One shared level."""

    levels = 1


class HydragenTwo(Parts):
    """Two shared levels."""

    levels = 2


METHODS: dict[str, type[Core]] = {
    "none": Core,
    "flash": Flash,
    "hydragen": Hydragen,
    "hydragen, two levels": HydragenTwo,
    "ours": Tree,
}


def _pages(spec: KVSpec, count: int, arena: Arena) -> KVPool:
    return ArenaPool(spec, count, 16, arena)


def _took(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Microseconds of a call; infinity where it cannot run, 0 on a CPU."""
    if q.device.type == "cpu":
        return 0.0
    from benchmarks.tree_attention.timing import replay_us

    try:
        return replay_us(lambda _: attend(q, k, v, 0.1), 1, repeats=3)
    except RuntimeError:
        return float("inf")


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
