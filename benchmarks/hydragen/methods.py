"""Cases, and the attention cores that are compared: each lays out KV, appends a step's K and V, and attends."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import rotated
from benchmarks.runner import replay_us
from benchmarks.shapes import Shape
from benchmarks.tree_attention.rivals import Attend, attend_levels, cudnn, flash
from benchmarks.tree_attention.workloads import MATMUL_TFLOPS, PAGE, READ_TBPS
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step, build_step
from prefixkit.kv.kv_pool import KVPool, KVSpec
from prefixkit.ops import library
from prefixkit.ops.backend import backend_for
from prefixkit.testing.named_trees import leaf_queries, regular

ALL = 99  # levels


@dataclass(frozen=True)
class Case:
    """``batch`` sequences below shared levels, each with ``private`` tokens of its own, that sample ``new`` more.

    ``levels`` are ``(nodes, tokens of each)`` from the root down; see ``named_trees.regular``.
    """

    levels: tuple[tuple[int, int], ...]
    batch: int
    new: int
    private: int = 0

    def parts(self, levels: int, new: int) -> list[tuple[int, int]]:
        """Copies and tokens of each part if ``levels`` levels are shared, the sequences' own part last."""
        own = sum(tokens for _, tokens in self.levels[levels:]) + self.private + new
        return [*self.levels[:levels], (self.batch, own)]

    def floor_ms(self, shape: Shape, new: int) -> float:
        """Least time of all layers' attention: bytes (KV once, queries, output) over bandwidth, or flops over rate."""
        parts, rows = self.parts(ALL, new), 4 * shape.layers * shape.heads * shape.head_dim * self.batch
        moved = sum(nodes * tokens for nodes, tokens in parts) * shape.bytes_per_token + rows
        return max(moved / READ_TBPS / 1e9, rows * sum(tokens for _, tokens in parts) / MATMUL_TFLOPS / 1e9)

    def mean(self, of: Callable[[int], float]) -> float:
        """Mean over a generation of a value given at its start, middle and end, linear in between."""
        return (of(1) + 2 * of(self.new // 2) + of(self.new)) / 4

    def step(self, new: int, planner: Planner, device: torch.device) -> Step:
        """The step that gives each sequence its ``new``-th token, over a tree with the KV of all before it."""
        snapshot, rows = regular(self.parts(ALL, new)), np.arange(self.batch)
        queries = leaf_queries(snapshot)
        snapshot.computed[queries.node] -= 1  # which the step appends
        return build_step(StepTree(snapshot, queries), rows % 251, rows, planner, device)


class Core:
    """Attention of a decode step in a patched model; this base class does none: its step is the ceiling."""

    shares = True  # whether its plan reads shared nodes once
    levels: int | None = None  # levels of the case stored once, in whole pages; None: no KV
    page = 1

    def __init__(self, case: Case, spec: KVSpec, heads: int) -> None:
        pages = self.tokens_held(case) // PAGE if self.page == PAGE else 2  # by which ops tell layers
        self.heads, self.pool = heads, KVPool(spec, pages, PAGE)
        self.layers = [[pages.normal_() for pages in self.pool.pages(at)] for at in range(len(spec.layers))]
        self.chosen: dict[str, str] = {}  # what it decided for the case, for the record

    @classmethod
    def tokens_held(cls, case: Case) -> int:
        """KV at the end of a case."""
        parts = [] if cls.levels is None else case.parts(cls.levels, case.new)
        return sum(nodes * -(-tokens // cls.page) * cls.page for nodes, tokens in parts)

    def at(self, step: Step) -> None:
        """Prepare this step."""
        self.now = step

    def installed(self) -> AbstractContextManager[object]:
        """A context in which the ops, and so a patched model, call the methods below instead of a backend's."""
        return mock.patch.object(library, "backend_for", lambda device: self)

    def kv_append(self, key: Tensor, value: Tensor, *where: Tensor) -> None:
        pass

    def rotary_append(self, q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *where: Tensor) -> Tensor:
        q, key = rotate(q, key, cos, sin)
        self.kv_append(key, value, *where)
        return q

    def linear_pair(self, x: Tensor, weight: Tensor) -> Tensor:
        return backend_for(x.device).linear_pair(x, weight)

    def tree_attention(self, q: Tensor, *over: Any) -> tuple[Tensor, Tensor]:
        return q, q.new_empty(q.shape[:2], dtype=torch.float32)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention from ``[batch, heads, head_dim]`` to the same shape, as in a patched model."""
        over = *self.layers[layer], self.now.positions, self.now.plan, q.shape[-1] ** -0.5, "causal"
        with self.installed():
            return torch.ops.prefixkit.tree_attention(q, *over)[0]


@torch.compile(disable=not torch.cuda.is_available())
def rotate(q: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin), rotated(key, cos, sin)


class Tree(Core):
    """prefixkit: KV in the pages of a tree, one launch a layer."""

    levels, page = ALL, PAGE

    def installed(self) -> AbstractContextManager[object]:
        return nullcontext()


class Parts(Core):
    """Dense KV: ``levels`` of the case stored once and attended to by all below, the rest held by each sequence."""

    levels = 0  # flash attention without sharing; 1: Hydragen; more: Hydragen's hierarchy

    def __init__(self, case: Case, spec: KVSpec, heads: int) -> None:
        super().__init__(case, spec, heads)
        *shared, (batch, self._own) = case.parts(self.levels, case.new)
        (k, _), *_ = spec.layers
        sizes = [*((n, k.heads, tokens, k.head_dim) for n, tokens in shared), (batch, self._own, k.heads, k.head_dim)]
        like: dict[str, Any] = {"device": spec.device, "dtype": spec.dtype}
        self.kv = {k.data_ptr(): [[torch.randn(of, **like) for _ in "kv"] for of in sizes] for k, _ in self.layers}
        self._shared, self._below = sum(tokens for _, tokens in shared), [batch // nodes for nodes, _ in shared]
        rows = torch.arange(batch + 1, dtype=torch.int32, device=spec.device)
        self._begin = {each: rows * each for each in (1, heads // k.heads, self._own)}
        self._attends = [self._fastest(*kv) for kv in self.kv[self.layers[0][0].data_ptr()][:-1]]

    def at(self, step: Step) -> None:
        super().at(step)
        self._used = (step.positions + 1 - self._shared).int()  # tokens that each sequence holds
        self._slots = self._begin[self._own][:-1] + self._used.long() - 1

    def fill(self, whole: list[Tensor]) -> None:
        """Store K and V of all sequences in full, ``[batch, tokens, kv_heads, head_dim]``, in the first layer."""
        (*levels, own), first = next(iter(self.kv.values())), 0
        for below, level in zip(self._below, levels, strict=True):
            for of, dense in zip(whole, level, strict=True):
                dense.copy_(of[::below, first : first + dense.shape[2]].transpose(1, 2))
            first += level[0].shape[2]
        for of, dense in zip(whole, own, strict=True):
            dense[:, : of.shape[1] - first] = of[:, first:]

    def kv_append(self, key: Tensor, value: Tensor, *where: Tensor) -> None:
        backend_for(key.device).kv_append(key, value, *self.kv[where[0].data_ptr()][-1], self._slots)

    def tree_attention(self, q: Tensor, *over: Any) -> tuple[Tensor, Tensor]:
        *levels, own = self.kv[over[0].data_ptr()]
        if not q.is_cuda:  # no such flash attention on a CPU: whole sequences, by torch
            shared = zip(self._below, levels, strict=True)
            parts = [[of.transpose(1, 2).repeat_interleave(below, 0) for of in level] for below, level in shared]
            k, v = (torch.cat(of, 1).transpose(1, 2) for of in zip(*parts, own, strict=True))
            seen = (torch.arange(k.shape[2]) <= self.now.positions[:, None])[:, None, None]
            return scaled_dot_product_attention(q[:, :, None], k, v, seen, enable_gqa=True)[:, :, 0], q
        if not levels:  # flash packs the query heads of a KV head itself, and splits long KV
            return self._flash(q, own, 1)
        # The query heads of a KV head together; without groups a view.
        packed = q.unflatten(1, (own[0].shape[2], -1)).transpose(0, 1).flatten(1, 2)
        parts = attend_levels(packed, levels, self._attends, q.shape[-1] ** -0.5)
        out, lse = self._flash(packed.transpose(0, 1), own, packed.shape[1] // len(q))
        parts.append((out.unflatten(0, (len(q), -1)).transpose(1, 2), lse.unflatten(1, (len(q), -1)).transpose(0, 1)))
        outs, lses = (list(of) for of in zip(*parts, strict=True))
        from benchmarks.tree_attention.merge import merge  # needs triton

        return merge(outs, lses, [*self._below, 1], self.heads), lse

    def _flash(self, q: Tensor, own: list[Tensor], rows: int) -> tuple[Tensor, Tensor]:
        """Attention of ``rows`` rows of each sequence to its own KV, whose lengths are on the device."""
        sizes = self._begin[rows], self._begin[self._own], rows, self._own, 0.0, False, False
        flat, options = (of.flatten(0, 1) for of in own), {"scale": q.shape[-1] ** -0.5, "seqused_k": self._used}
        return torch.ops.aten._flash_attention_forward(q, *flat, *sizes, **options)[:2]

    def _fastest(self, k: Tensor, v: Tensor) -> Attend:
        """The fastest library on a level."""
        ways, (nodes, kv_heads, tokens, head_dim) = {"flash": flash, "cudnn": cudnn}, k.shape
        rows = (len(self._begin[1]) - 1) // nodes * self.heads // kv_heads
        q = torch.randn(nodes, kv_heads, rows, head_dim, device=k.device, dtype=k.dtype)

        def us(name: str) -> float:
            try:
                return replay_us(lambda _: ways[name](q, k, v, 0.1), repeats=3)
            except RuntimeError:  # it cannot run
                return math.inf

        best = min(ways, key=us) if k.is_cuda else "flash"
        self.chosen[f"level of {nodes} x {tokens}"] = best
        return ways[best]


METHODS: dict[str, type[Core]] = {
    "none": Core,
    "flash": Parts,
    "hydragen": type("Hydragen", (Parts,), {"levels": 1}),
    "hydragen, two levels": type("HydragenTwo", (Parts,), {"levels": 2}),
    "ours": Tree,
    "ours, sharing": Tree,
    "ours, not sharing": type("Unshared", (Tree,), {"shares": False}),
}
