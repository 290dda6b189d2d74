"""A step of a model of one's own: plan it, append K and V, attend, and commit it to the tree.

    attention = TreeAttention(pool, num_qo_heads)
    step = plan(attention, tree, sequences)        # once for all layers
    append(step, layer, key, value)                # in each layer
    out, lse = attend(step, layer, q)
    commit(step)                                   # once all layers have run

The rows of a step are the tokens that run, in depth-first order of the tree; see :class:`TreeStep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.planner import Planner
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.step import Step
from prefixkit.attention.variants import CAUSAL, Variant, register
from prefixkit.functional.given_pages import GivenPages
from prefixkit.kv.kv_pool import KVPool
from prefixkit.ops.arguments import FLOATS, check_append, check_tensors, expect
from prefixkit.ops.backend import backend_for
from prefixkit.ops.partial_states import State, merge_parts
from prefixkit.ops.streaming import Rotated, streaming_attention
from prefixkit.tree.changes.gaps import drop_between
from prefixkit.tree.node import Node
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence as TreeSequence
from prefixkit.tree.sequence import check_live


@dataclass(frozen=True, eq=False)
class TreeAttention:
    """What layers with equal attention share: the pool, the number of heads, the variant and the scale.

    A ``TreeAttention`` holds the last plan, and :func:`plan` uses it again while the tree only grows; so use a separate
    one for each tree that decodes.  Layers with different attention, such as those with a window and those without,
    have one each.

    Attributes:
        pool: The pool of K and V (:func:`kv_pool`, :func:`kv_pool_from_tensors`).  All its layers have the same heads.
        num_qo_heads: Query heads, a multiple of the pool's KV heads.
        variant: Changes scores, and says which keys queries see.
        scale: Factor on ``q . k``; None: ``head_dim ** -0.5``.
        planners: The planners of steps; a variant at positions in the cache has one for the window, and one for the
            sinks.
        keys: The keys by which ops find the variant, or its two parts.

    Raises:
        ValueError: the heads do not fit the pool; its layers differ, or cache other tensors than K and V; or the scale
            is not a positive, finite number.
        TypeError: the pool or the variant is of another type.
        BackendError: no backend runs on the pool's device.
    """

    pool: KVPool | GivenPages
    num_qo_heads: int
    variant: Variant = CAUSAL
    scale: float | None = None
    planners: tuple[Planner, ...] = field(init=False, repr=False)
    keys: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pool, KVPool | GivenPages):
            raise TypeError(
                f"TreeAttention: pool must be what kv_pool or kv_pool_from_tensors made, got {type(self.pool).__name__}"
            )
        spec = self.pool.spec
        (cached, *others), heads = spec.tensors, self.num_qo_heads
        if others or len(cached) != 2 or cached[0].heads != cached[1].heads:
            raise ValueError(
                f"TreeAttention: the pool's layers must all cache K and V of the same heads, got {spec.kinds}; make a "
                "pool for each kind of layers, see kv_pool()"
            )
        k, v = cached
        if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1 or heads % k.heads:
            raise ValueError(
                f"TreeAttention: num_qo_heads must be a multiple of the pool's {k.heads} KV heads, got {heads!r}"
            )
        if not isinstance(self.variant, Variant):
            raise TypeError(f"TreeAttention: variant must be a Variant, got {type(self.variant).__name__}")
        # torch's kernel on CPUs multiplies what causality hides, -inf, by the scale.
        if self.scale is not None and not (
            isinstance(self.scale, Real) and 0 < self.scale <= torch.finfo(torch.float32).max
        ):
            raise ValueError(
                f"TreeAttention: scale must be a positive number of float32, got {self.scale!r}; None is head_dim ** "
                "-0.5; to reverse the order of scores, negate q"
            )
        shape = HeadShape(heads, k.heads, k.head_dim, spec.dtype.itemsize, v.head_dim)
        planner_for, parts = backend_for(spec.device).planner_for, self.variant.parts
        planners = tuple(planner_for(shape, spec.device, spec.compute_dtype, part.visible) for part in parts)
        object.__setattr__(self, "keys", tuple(map(register, parts)))
        object.__setattr__(self, "planners", planners)

    @property
    def planner(self) -> Planner:
        """The first of ``planners``; ``planner.plans_made`` counts plans."""
        return self.planners[0]


@dataclass(frozen=True, eq=False)
class TreeStep:
    """The tokens that one forward pass runs, and the plan by which they attend.

    Attributes:
        attention: The attention for which the step was planned.
        step: The step's tensors and its plan.
        tree: The tree of the step; None for page tables.
        nodes: The nodes whose tokens run.
        masked: The plan's tensors, with classes of blocks under the variant's mask; None where there are none.
    """

    attention: TreeAttention
    step: Step
    tree: PrefixTree | None = None
    nodes: Sequence[Node] = ()
    masked: list[Tensor] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"TreeStep({self.num_rows} rows, {len(self.last_rows)} sequences, {self.attention})"

    @property
    def num_rows(self) -> int:
        """``T``, the tokens that run."""
        return self.step.num_rows

    @property
    def tokens(self) -> Tensor:
        """``[T]`` int64 token ids; zeros if the tree is one of page tables, which has no ids."""
        return self.step.tokens

    @property
    def positions(self) -> Tensor:
        """``[T]`` int64 positions in their sequences."""
        return self.step.positions

    @property
    def slots(self) -> Tensor:
        """``[T]`` int64 pool slots that receive their K and V; -1 for a token that has KV already."""
        return self.step.slots

    @property
    def last_rows(self) -> Tensor:
        """``[sequences]`` int64 the row of each sequence's last token, in the order of the sequences that were passed.

        For page tables: the row of each request's last token.
        """
        return self.step.logit_rows

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """The number of tokens whose K and V one layer reads, and the number that it would read without sharing."""
        return self.step.kv_tokens


def append(step: TreeStep, layer: int, key: Tensor, value: Tensor) -> None:
    """Transform K and V of a step's tokens as the variant says, and write them to the pages of a layer.

    Args:
        step: The step.
        layer: The layer's index in the pool, from 0.
        key, value: ``[T, kv_heads, head_dim]`` in the pool's dtype; keys are given after the rotary embedding, unless
            the variant's ``key`` transform rotates them.

    Raises:
        BadShape, BadDtype, BadDevice: they do not fit the step or the pool.
        TypeError: one is no tensor.
        BadTransform: a transform returns something else.
        IndexError: the pool has no such layer.
    """
    check_tensors("append", key=key, value=value)
    transforms, (k_pages, v_pages) = step.attention.variant.transforms, step.attention.pool.pages(layer)
    if transforms.key or transforms.value:
        check_append(key, value, k_pages, v_pages, step.slots, "append")
        key, value = transforms.of("key", key, step.positions), transforms.of("value", value, step.positions)
    torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, step.slots)


def attend(step: TreeStep, layer: int, q: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention of a step's queries over the tree.

    Args:
        step: The step.
        layer: The layer's index in the pool; K and V of the step's tokens must have been appended to it.
        q: ``[T, num_qo_heads, head_dim]`` in the pool's dtype, or in any dtype if that is e4m3; given after the rotary
            embedding, unless the variant's ``query`` transform rotates queries.  Under a variant at positions in the
            cache that transform runs at both positions of each query.
        sinks: ``[num_qo_heads]`` in q's dtype, if the variant has sinks.

    Returns:
        ``out [T, num_qo_heads, v_dim]`` in q's dtype and ``lse [T, num_qo_heads]`` float32: the natural logarithm of
        the softmax's denominator, of scaled scores.

    Raises:
        BadShape, BadDtype, BadDevice: q does not fit the step or the pool.
        TypeError: it is no tensor.
        BadTransform: a transform of the variant returns something else.
        IndexError: the pool has no such layer.
    """
    attention = step.attention
    check_tensors("attend", q=q, **({} if sinks is None else {"sinks": sinks}))
    k_pages, v_pages = attention.pool.pages(layer)
    expected = (step.num_rows, attention.num_qo_heads, k_pages.shape[3])
    if q.shape != expected:
        expect("attend", "q", q, f"{list(expected)} (rows of the step, num_qo_heads, head_dim of the pool)", False)
    scale = q.shape[2] ** -0.5 if attention.scale is None else attention.scale
    variant, positions = attention.variant, step.positions
    transforms, plans = variant.transforms, [plan.tensors for plan in step.step.plans]
    plans[0] = step.masked or plans[0]
    at = [positions] if variant.streaming is None else [positions, variant.streaming.in_cache(positions)]
    asked = [transforms.of("query", q, each) for each in at]
    if variant.streaming is None:
        out, lse = torch.ops.prefixkit.tree_attention(
            asked[0], k_pages, v_pages, positions, plans[0], scale, attention.keys[0], sinks
        )
    else:
        near, far = map(Rotated, asked, at, plans, attention.keys)
        out, lse = streaming_attention(near, far, (k_pages, v_pages), scale, sinks)
    return transforms.of("output", out, positions), lse


def commit(step: TreeStep) -> None:
    """Declare that the tokens of a step have KV in all layers: later steps read it, and do not run these tokens.

    Raises:
        ValueError: the tree was changed since the step was planned, except for tokens that were appended to leaves; or
            the step is one of page tables or of static buffers.
        TypeError: ``step`` is no step.
    """
    if not isinstance(step, TreeStep):
        raise TypeError(f"commit: step must be what plan returned, got {type(step).__name__}")
    if step.tree is None:
        raise ValueError(
            "commit: a step of page tables or static buffers keeps no record in a tree; make the next step's tree of "
            "its tables, or add the tokens that were sampled by extend_leaves"
        )
    batch = step.step.plans[0].tree
    if batch.snapshot.version != step.tree.version:
        raise ValueError(
            "commit: the tree was changed since the step was planned; commit a step before sequences are inserted, "
            "released or extended from shared nodes, or plan again"
        )
    # At least what has KV now: steps planned later may have been committed before.
    step.tree.mark_computed(step.nodes, np.maximum(batch.queries.end, [node.computed for node in step.nodes]))


def release_unseen(attention: TreeAttention, tree: PrefixTree, sequences: Sequence[TreeSequence]) -> int:
    """Free the pages of tokens that no later query of the sequences sees: all but the sinks and the window.

    Only pages of a leaf that belongs to one sequence are freed: tokens that sequences share stay, such as a prompt at
    whose end a sequence is held.  Sequences keep their lengths, and tokens their positions; later sequences do not find
    tokens behind a gap, and :meth:`Sequence.tokens` raises.  The next step makes a new plan, so call this every 64
    tokens or more.

    Args:
        attention: The attention of the layers that see the most; no layer over the tree may see more.
        tree, sequences: A tree of tokens, and those of its sequences that will run.

    Returns:
        The number of pages that were freed.

    Raises:
        ValueError: the variant has no window and is not one at positions in the cache; or a sequence has ended.
    """
    variant = attention.variant
    visible = variant.parts[0].visible
    if visible.window is None and visible.chunk is None:
        raise ValueError(
            f"release_unseen: under variant {variant.name!r} later queries may see all tokens; take one with a window, "
            "such as variants.streaming_llm or variants.sliding_window"
        )
    for sequence in sequences:
        check_live(tree, sequence)
    ends = visible.begin(np.array([sequence.length - 1 for sequence in sequences], np.int64)).tolist()
    return sum(drop_between(tree, one, visible.first, end) for one, end in zip(sequences, ends, strict=True))


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys (Ye et al. 2025, 2.2); exact except for rounding.

    Args:
        out_a, out_b: ``[T, heads, v_dim]`` in one dtype, as :func:`attend` returns them.
        lse_a, lse_b: ``[T, heads]`` float32, natural logarithm; -inf where a row saw no key.  FlashInfer's log-sum-exps
            are to base 2: multiply them by ``math.log(2)``.

    Returns:
        ``out`` in their dtype and ``lse`` float32.  Sums are float32.

    Raises:
        BadShape, BadDtype, BadDevice: they do not fit each other.
        TypeError: one is no tensor.
    """
    check_tensors("merge", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    expect("merge", "out_a", out_a, "[T, heads, v_dim]", out_a.ndim == 3, FLOATS)
    for name, tensor, like in (("out_b", out_b, out_a), ("lse_a", lse_a, out_a[..., 0]), ("lse_b", lse_b, lse_a)):
        dtype = out_a.dtype if name == "out_b" else torch.float32
        shape = f"{list(like.shape)} like out_a"
        expect("merge", name, tensor, shape, tensor.shape == like.shape, (dtype,), out_a.device)
    parts = State(out_a.float(), lse_a), State(out_b.float(), lse_b)
    merged = merge_parts(parts, may_be_empty=True, sinks=None)
    return merged.out.to(out_a.dtype), merged.lse
