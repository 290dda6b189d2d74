"""What steps of a model of one's own refuse, by the name of what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import prefixkit
from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.tree import OutOfPages
from tests.functional.own_model import DIM, HEADS, KV_HEADS, pool_of


def test_errors_name_what_is_wrong_before_anything_changes() -> None:
    pool = pool_of(torch.float32, 4, num_pages=8)
    tree, (one, two) = prefixkit.tree_from_tokens(pool, [[1, 2, 3], [1, 2, 4]])
    attention = prefixkit.TreeAttention(pool, HEADS)
    other, (stranger,) = prefixkit.tree_from_tokens(pool_of(torch.float32, 8), [[1]])
    for call, message in (
        (lambda: prefixkit.TreeAttention(pool, 3), "num_qo_heads must be a multiple of the pool's 2 KV heads, got 3"),
        (lambda: prefixkit.TreeAttention(pool, HEADS, scale=math.nan), "scale must be a positive number of float32"),
        (lambda: prefixkit.TreeAttention(pool, HEADS, scale=0.0), "got 0.0; None is head_dim"),
        (lambda: prefixkit.TreeAttention(pool, HEADS, scale=1e39), "got 1e\\+39; None is head_dim"),
        (lambda: prefixkit.plan(attention, tree, []), "needs the sequences that run"),
        (lambda: prefixkit.plan(attention, tree, [stranger]), "belongs to another tree"),
        (lambda: prefixkit.plan(attention, other, [stranger]), "512 pages of 8 tokens, but the pool has 8 of 4"),
        (lambda: prefixkit.plan(attention, tree, [one], 4), r"at most the sequence's tokens; got 4 .* \[3\] tokens"),
        (lambda: prefixkit.plan(attention, tree, [one], 0), "at least 1"),
        (lambda: prefixkit.plan(attention, tree, [one, two], [1, 1, 1]), "one for each sequence"),
        (lambda: prefixkit.plan(attention, tree, [one], 1.5), "num_queries must be one number"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            call()
    given: Any = prefixkit  # as from code without types
    for call, message in (
        (lambda: given.TreeAttention(pool, HEADS, pool_of), "variant must be a Variant, got function"),
        (
            lambda: given.TreeAttention(tree, HEADS),
            "pool must be what kv_pool or kv_pool_from_tensors made, got Prefix",
        ),
        (lambda: given.plan(attention, [1], [one]), "tree must be a PrefixTree or come from tree_from_cascade, got l"),
        (lambda: given.plan(pool, tree, [one]), "attention must be a TreeAttention, got KVPool"),
        (lambda: given.plan(attention, tree, one), r"sequences must be a list, got one sequence; pass \[sequence\]"),
        (lambda: given.plan(attention, tree, [one, 0]), "sequences must be what insert and fork returned, got int 0"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(OutOfPages, match="release or trim sequences, or build the tree with more pages"):
        tree.extend(one, [5] * 99)
    released = tree.fork(one)[0]
    tree.release(released)
    with pytest.raises(ValueError, match="has been released"):
        prefixkit.plan(attention, tree, [released])
    assert tree.snapshot().computed.sum() == 0 and attention.planner.plans_made == 0


def test_tensors_that_do_not_fit_a_step_are_refused_by_name() -> None:
    pool = pool_of(torch.float32, 4)
    tree, samples = prefixkit.tree_from_tokens(pool, [[1, 2, 3]])
    step = prefixkit.plan(prefixkit.TreeAttention(pool, HEADS), tree, samples)
    q, key = torch.zeros(3, HEADS, DIM), torch.zeros(3, KV_HEADS, DIM)
    with pytest.raises(BadShape, match=r"attend: q must have shape \[3, 4, 64\] \(rows of the .* got \[5, 4, 64\]"):
        prefixkit.attend(step, 0, torch.zeros(5, HEADS, DIM))
    with pytest.raises(BadDtype, match=r"q must be torch.float32 like the pages, got torch.bfloat16; convert"):
        prefixkit.attend(step, 0, q.bfloat16())
    with pytest.raises(BadShape, match="kv_append: key must have shape"):
        prefixkit.append(step, 0, key[:2], key)
    with pytest.raises(BadDtype, match=r"value must be torch.float32 like the pages"):
        prefixkit.append(step, 0, key, key.half())
    with pytest.raises(IndexError, match=r"layer 1 of a pool for layers 0..0"):
        prefixkit.append(step, 1, key, key)
    with pytest.raises(BadShape, match="has no sinks, but some are given"):
        prefixkit.attend(step, 0, q, torch.zeros(HEADS))
    given: Any = prefixkit  # as from code without types
    for call, message in (
        (lambda: given.append(step, 0, key, key.numpy()), "append: value must be a tensor, got ndarray"),
        (lambda: given.attend(step, 0, q.tolist()), "attend: q must be a tensor, got list"),
        (lambda: given.merge(q, None, q, q[..., 0]), "merge: lse_a must be a tensor, got NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    elsewhere = key.to("meta")
    with pytest.raises(BadDevice, match="q is on meta, but the first tensor is on cpu; move it"):
        prefixkit.attend(step, 0, q.to("meta"))
    with pytest.raises(BadDevice, match="kv_append: key is on meta"):
        prefixkit.append(step, 0, elsewhere, key)
    lse = torch.zeros(3, HEADS)
    with pytest.raises(BadDevice, match="merge: lse_a is on meta"):
        prefixkit.merge(q, lse.to("meta"), q, lse)
    for given, message in (
        ((q, lse, q[:2], lse), r"merge: out_b must have shape \[3, 4, 64\]"),
        ((q, lse[:, :2], q, lse), r"merge: lse_a must have shape \[3, 4\]"),
        ((q[0], lse, q, lse), r"merge: out_a must have shape \[T, heads, v_dim\]"),
    ):
        with pytest.raises(BadShape, match=message):
            prefixkit.merge(*given)
    with pytest.raises(BadDtype, match=r"merge: out_b must be torch.float32"):
        prefixkit.merge(q, lse, q.half(), lse)
    with pytest.raises(BadDtype, match=r"merge: lse_b must be torch.float32"):
        prefixkit.merge(q, lse, q, lse.double())


def test_a_step_is_committed_before_its_tree_changes() -> None:
    pool = pool_of(torch.float32, 4)
    tree, samples = prefixkit.tree_from_tokens(pool, [[1, 2, 3]])
    attention = prefixkit.TreeAttention(pool, HEADS)
    step = prefixkit.plan(attention, tree, samples)
    tree.insert([1, 2, 9])
    with pytest.raises(ValueError, match="the tree was changed since the step was planned; commit a step before"):
        prefixkit.commit(step)
    with pytest.raises(TypeError, match="commit: step must be what plan returned, got TreeAttention"):
        prefixkit.commit(attention)  # type: ignore[arg-type]
    assert samples[0].computed == 0
    step = prefixkit.plan(attention, tree, samples)
    tree.extend_each(samples, [7])  # a leaf that grows is fine
    prefixkit.commit(step)
    assert samples[0].computed == 3


def test_layers_of_a_pool_must_be_alike() -> None:
    from prefixkit.kv.kv_pool import KVPool, KVSpec
    from prefixkit.kv.layer_kinds import CachedTensor

    small, large = CachedTensor(2, 16), CachedTensor(2, 32)
    with pytest.raises(ValueError, match="make a pool for each kind of layers"):
        prefixkit.TreeAttention(KVPool(KVSpec(((small, small), (large, large))), 4), HEADS)
    with pytest.raises(ValueError, match="K and V of the same heads"):
        prefixkit.TreeAttention(KVPool(KVSpec(((small,),)), 4), HEADS)
