"""Steps and numbers for variants: in prefixkit's form, and in those of FlexAttention and FlashInfer."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import prefixkit.backends  # noqa: F401  (registers them)
from benchmarks.runner import Replay, input_sets, wall_seconds
from benchmarks.tree_attention.rivals import Unfit
from benchmarks.tree_attention.variant_cases import Mods, Numbers
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import Step, build_step
from prefixkit.attention.variants import Variant, register
from prefixkit.backends.cuda.device_planner import PLAN_TENSORS
from prefixkit.cuda import jit
from prefixkit.functional.build_trees import kv_pool
from prefixkit.ops import library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.ops.backend import backend_for
from prefixkit.testing.named_trees import PAGE, prompts
from prefixkit.tree.snapshot import TreeSnapshot

Attend = Callable[[int], Any]


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and of KV heads, and the head size."""

    query: int = 32
    kv: int = 8
    dim: int = 128

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


@dataclass(frozen=True)
class Plain:
    """``count`` sequences of ``length`` tokens that share nothing, the last ``queries`` of each run."""

    count: int
    length: int
    queries: int

    def tree(self) -> tuple[TreeSnapshot, Queries]:
        return prompts(self.length, self.queries, self.count)


@dataclass(frozen=True, eq=False)
class Inputs:
    """One step's numbers.

    Attributes:
        q: For each set ``[rows, heads, dim]``.
        k, v: For each set ``[pages, page size, kv_heads, dim]``, in the layout of a pool on the device.
        plain: The plain batch to which the tree is equal, if there is one.
    """

    snapshot: TreeSnapshot
    queries: Queries
    heads: Heads
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    plain: Plain | None = None

    @property
    def device(self) -> torch.device:
        return self.q[0].device

    @cached_property
    def tree(self) -> StepTree:
        return StepTree(self.snapshot, self.queries)

    def dense(self, pages: Tensor) -> Tensor:
        """``[count, kv_heads, length, dim]`` K or V of a plain batch, contiguous."""
        assert self.plain is not None, "only plain batches have a dense layout"
        by_page = pages.unflatten(0, (self.plain.count, -1)).permute(0, 3, 1, 2, 4)
        return by_page.reshape(self.plain.count, self.heads.kv, self.plain.length, self.heads.dim)

    def by_sequence(self, rows: Tensor) -> Tensor:
        """``[count, heads, queries, ...]`` of a plain batch's rows, contiguous."""
        assert self.plain is not None, "only plain batches have a dense layout"
        return rows.unflatten(0, (self.plain.count, self.plain.queries)).transpose(1, 2).contiguous()


def make(
    tree: tuple[TreeSnapshot, Queries], heads: Heads, dtype: torch.dtype, device: str, plain: Plain | None = None
) -> Inputs:
    """Random numbers for a step, in so many sets that none is still in the L2 when its turn comes."""
    snapshot, queries = tree
    pages = int(snapshot.page_indptr[-1])
    sets = input_sets(4 * heads.kv * heads.dim * snapshot.num_tokens) if device == "cuda" else 1
    pool = kv_pool(sets, heads.kv, heads.dim, pages, PAGE, dtype, device)
    k, v = ([pages.normal_() for pages in each] for each in zip(*map(pool.pages, range(sets)), strict=True))
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    q = [torch.randn(queries.num_rows, heads.query, heads.dim, **like) for _ in range(sets)]
    return Inputs(snapshot, queries, heads, q, k, v, plain)


@dataclass(eq=False)
class Ours:
    """Our op over a step, planned for one variant; the constructor plans, and compiles nothing.

    Attributes:
        plan: The op's tensors from :func:`plan_tensors`, which :meth:`classify` makes.
        plan_ms: Milliseconds of planning on the host, with the upload.
    """

    inputs: Inputs
    variant: Variant
    key: str = field(init=False)
    step: Step = field(init=False)
    plan: list[Tensor] = field(init=False)
    plan_ms: float = field(init=False)

    def __post_init__(self) -> None:
        inputs, heads, device = self.inputs, self.inputs.heads, self.inputs.device
        self.key = register(self.variant)
        shape = HeadShape(heads.query, heads.kv, heads.dim, inputs.q[0].itemsize)
        planner = backend_for(device).planner_for(shape, device, inputs.q[0].dtype, self.variant.visible)
        tokens = np.zeros(inputs.queries.num_rows, dtype=np.int64)
        wait(device)
        began = time.perf_counter()
        self.step = build_step(inputs.tree, tokens, tokens[:0], planner, device)
        wait(device)
        self.plan_ms = (time.perf_counter() - began) * 1e3
        self.plan = self.step.plan

    def classify(self) -> None:
        """Make the plan for this variant's mask."""
        self.plan = plan_tensors(self)

    def first(self) -> tuple[Tensor, Tensor]:
        """The first call of a variant over a step, with the classes that it needs."""
        self.classify()
        return self.attend(0)

    def classes(self) -> Tensor:
        """Classes of the plan's blocks of KV; an empty tensor if there are none."""
        heads, page_size = self.inputs.heads, self.inputs.snapshot.page_size
        sizes = [heads.query, heads.kv, heads.dim, heads.dim]
        classify: Callable[..., Tensor] = torch.ops.prefixkit.classify_blocks
        return classify(self.step.positions, self.step.plan, sizes, page_size, self.key)

    def attend(self, index: int) -> tuple[Tensor, Tensor]:
        """``out [rows, heads, dim]`` and ``lse [rows, heads]`` of an input set."""
        of, op = self.inputs, torch.ops.prefixkit.tree_attention
        out, lse = op(
            *(of.q[index], of.k[index], of.v[index], self.step.positions, self.plan, of.heads.scale, self.key)
        )
        return out, lse

    def kv_tokens(self) -> int:
        """Tokens whose K and V are read by the plan, without hidden blocks."""
        return self.step.plans[0].kv_tokens_read(self.step.length)


def plan_tensors(ours: Ours) -> list[Tensor]:
    """The op's argument ``plan``: the step's plan, numbers of sequences, and classes if there are any."""
    plan, classes = ours.step.plan, ours.classes()
    if not classes.numel():
        return plan
    sequences = plan[PLAN_TENSORS:] or [torch.empty(0, dtype=torch.int64, device=classes.device)]
    return [*plan[:PLAN_TENSORS], *sequences, classes]


def compiled_kernels() -> int:
    """Kernels of ours that this process has had to compile or read from the disk so far."""
    return jit.binary.cache_info().misses


def flex_graphs() -> int:
    """Graphs that torch.compile has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def flex_anew() -> None:
    """Let FlexAttention compile as in a new process: dynamo gives up on the ninth graph of a function."""
    torch._dynamo.reset()


class Flex:
    """FlexAttention over a plain batch; compiled on a GPU, each shape and each number that it captures by itself."""

    def __init__(self, inputs: Inputs, backend: str | None = None) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        self._attend: Callable[..., Any] = compiled if inputs.device.type == "cuda" else flex_attention
        self._q = [inputs.by_sequence(q) for q in inputs.q]
        self._kv = [(inputs.dense(k), inputs.dense(v)) for k, v in zip(inputs.k, inputs.v, strict=True)]
        heads = inputs.heads
        self._options: dict[str, Any] = {"scale": heads.scale, "enable_gqa": heads.query != heads.kv}
        if backend is not None:
            self._options["kernel_options"] = {"BACKEND": backend}
        self._inputs, self.score_mod, self.block_mask = inputs, None, None
        self.mask_ms = 0.0

    def use(self, mods: Mods) -> None:
        """Use a variant, and make its block mask, which a causal batch of one query each does not need."""
        from torch.nn.attention.flex_attention import create_block_mask

        plain, device = self._inputs.plain, self._inputs.device
        assert plain is not None, "it knows plain batches only"
        score_mod, mask_mod = mods.at(plain.length - plain.queries)
        self.score_mod, self.block_mask = score_mod, None
        wait(device)
        began = time.perf_counter()
        if mods.mask is not None or plain.queries > 1:
            self.block_mask = create_block_mask(mask_mod, None, None, plain.queries, plain.length, device=device)
        wait(device)
        self.mask_ms = (time.perf_counter() - began) * 1e3

    def attend(self, index: int, count: int | None = None) -> Tensor:
        """``[count, heads, queries, dim]`` of the first ``count`` sequences of an input set, by default of all."""
        q, (k, v) = self._q[index], self._kv[index]
        of = {"score_mod": self.score_mod, "block_mask": self.block_mask}
        return self._attend(q[:count], k[:count], v[:count], **of, **self._options)  # type: ignore[no-any-return]

    def attend_with_lse(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp ``[count, heads, queries]`` of the first input set."""
        from torch.nn.attention import flex_attention as module

        aux: Any = getattr(module, "AuxRequest", None)  # before torch 2.9 it was return_lse
        wanted = {"return_lse": True} if aux is None else {"return_aux": aux(lse=True)}
        of = {"score_mod": self.score_mod, "block_mask": self.block_mask}
        out, found = self._attend(self._q[0], *self._kv[0], **of, **self._options, **wanted)
        return out, found if isinstance(found, Tensor) else found.lse


def absent() -> dict[str, str]:
    """The contenders that are not installed here, and what they need."""
    needed = {"flex_flash": "flash_attn.cute", "flashinfer": "flashinfer"}
    return {who: f"{module} is not installed" for who, module in needed.items() if not _installed(module)}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the package is not installed
        return False


def flashinfer(inputs: Inputs, name: str, numbers: Numbers) -> Attend:
    """FlashInfer's paged attention under the variants that are its options; Unfit for others."""
    import flashinfer as rival  # type: ignore[import-not-found]

    windowed, capped = {"window_left": numbers.window - 1}, {"logits_soft_cap": numbers.cap}
    known: dict[str, dict[str, Any]] = {"causal": {}, "window": windowed, "soft-cap": capped}
    known |= {"soft-cap + window": {**windowed, **capped}, "alibi": {"pos_encoding_mode": "ALIBI"}}
    if name not in known or inputs.plain is None:
        raise Unfit("it has no option for this variant")
    plain, heads, device = inputs.plain, inputs.heads, inputs.device
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    wrapper = rival.BatchPrefillWithPagedKVCacheWrapper(torch.empty(512 << 20, dtype=torch.uint8, device=device), "HND")
    pages = plain.length // PAGE
    wrapper.plan(
        torch.arange(plain.count + 1, **ints) * plain.queries,
        torch.arange(plain.count + 1, **ints) * pages,
        torch.arange(plain.count * pages, **ints),
        torch.full((plain.count,), PAGE, **ints),
        *(heads.query, heads.kv, heads.dim, PAGE),
        causal=True,
        q_data_type=inputs.q[0].dtype,
        **known[name],
    )
    return lambda index: wrapper.run(inputs.q[index], tuple(of[index].transpose(1, 2) for of in (inputs.k, inputs.v)))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """A function that times a call on a GPU, in microseconds, by a graph that is captured when the function is made.

    It keeps a reference to ``attend``, and so to all tensors that the graph reads.
    """

    def __init__(self, attend: Attend, sets: int) -> None:
        self.attend, self._replay = attend, Replay(attend, sets)

    def __call__(self) -> float:
        return self._replay.us(3)


@dataclass(frozen=True)
class HostClock:
    """Microseconds of a call on a CPU."""

    attend: Attend

    def __call__(self) -> float:
        return wall_seconds(partial(self.attend, 0))[0] * 1e6
