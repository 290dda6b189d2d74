"""Pools, and trees over them: from token lists, and from parents and lengths."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike

from prefixkit.functional.given_pages import GivenPages
from prefixkit.functional.owners import claim
from prefixkit.kv.kv_pool import KVPool, KVSpec
from prefixkit.kv.layer_kinds import CachedTensor
from prefixkit.tree.pages import check_page_size
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence as TreeSequence


def kv_pool(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_pages: int,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    v_dim: int | None = None,
) -> KVPool:
    """Make a pool of pages for K and V of layers with equal heads.

    Args:
        num_layers, num_kv_heads, head_dim: The model's layers, KV heads and head size.
        num_pages, page_size: The pool holds ``num_pages * page_size`` tokens; ``page_size`` is 1 to 128.
        dtype: float32, bfloat16 or float16, which q, K and V must have too; or float8_e4m3fn, to which K and V of any
            of these dtypes are rounded.
        device: A CPU or a GPU.
        v_dim: Size of V's heads; None: ``head_dim``.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type, or this machine has no such device.
        KVPoolTooLarge: the device does not have that much memory.
    """
    check_page_size(page_size)
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_pages": num_pages}
    for name, value in (sizes | {"v_dim": head_dim if v_dim is None else v_dim}).items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"kv_pool: {name} must be an integer, got {type(value).__name__} {value!r}")
        if value < 1:
            raise ValueError(f"kv_pool: {name} must be at least 1, got {value}")
    where = _device(device)
    k, v = CachedTensor(num_kv_heads, head_dim), CachedTensor(num_kv_heads, head_dim if v_dim is None else v_dim)
    return KVPool(KVSpec(((k, v),) * num_layers, dtype, where), num_pages, page_size)


def _device(given: torch.device | str) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"kv_pool: device must be a CPU or a GPU, got {given!r}; pass 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"kv_pool: device must be a CPU or a GPU, got {given!r}; pass 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"kv_pool: torch finds {count} GPUs, and device is {given!r}; pass one of these, or 'cpu'")
    return device


def tree_from_tokens(pool: KVPool | GivenPages, tokens: Iterable[ArrayLike]) -> tuple[PrefixTree, list[TreeSequence]]:
    """Make a tree over a pool from lists of tokens, and one sequence for each; shared tokens are found token by token.

    The tree grows by ``insert``, ``fork``, ``extend`` and ``extend_each``, and shrinks by ``trim`` and ``release``.

    Args:
        pool: A pool that holds no KV of another tree.  An earlier tree that has no pages now, and gets some later, is
            refused by :func:`plan`.
        tokens: For each sequence ``[length]`` token ids of any integer type, at least one.

    Raises:
        ValueError, TypeError: tokens are empty or no token ids; or another tree has sequences in the pool.
        OutOfPages: the pool has too few.
    """
    tree = PrefixTree(pool.num_pages, pool.page_size)
    claim("tree_from_tokens", pool, tree)
    return tree, [tree.insert(values) for values in tokens]


def tree_from_parents(
    pool: KVPool | GivenPages, parents: Sequence[int], lengths: Sequence[int]
) -> tuple[PrefixTree, list[TreeSequence]]:
    """Make a tree of given nodes over a pool, and a sequence for each node, which ends there.

    This is for models without token ids.  All tokens of a node have the node's number as their id.  The tree grows
    like one of tokens; a node whose sequence is released, and which has one child, may be merged with that child.

    Args:
        pool: A pool that holds no KV of another tree.
        parents: ``[nodes]`` the index of each node's parent, which must come before the node; -1 for a root.
        lengths: ``[nodes]`` the number of tokens in each node, at least 1.

    Raises:
        ValueError: lengths differ, a parent does not exist or comes later, or a node has no tokens; or another tree
            has sequences in the pool.
        TypeError: a parent or a length is no integer.
        OutOfPages: the pool has too few.
    """
    parents, lengths = _integers("parents", parents), _integers("lengths", lengths)
    if len(parents) != len(lengths):
        raise ValueError(
            f"tree_from_parents: one length for each node, got {len(parents)} parents and {len(lengths)} lengths"
        )
    for node, (above, length) in enumerate(zip(parents, lengths, strict=True)):
        if not -1 <= above < node:
            what = "does not exist" if not 0 <= above < len(parents) else "does not come before it"
            raise ValueError(
                f"tree_from_parents: node {node} has parent {above}, which {what}; list parents before their children, "
                "and -1 for a root"
            )
        if length < 1:
            raise ValueError(f"tree_from_parents: node {node} must have at least 1 token, got {length}")
    tree, sequences = PrefixTree(pool.num_pages, pool.page_size), list[TreeSequence]()
    claim("tree_from_parents", pool, tree)
    for node, (above, length) in enumerate(zip(parents, lengths, strict=True)):
        tokens = np.full(length, node, np.int32)
        if above < 0:
            sequences.append(tree.insert(tokens))
            continue
        # Two sequences now end at the parent, so extending this one makes a node of its own.
        sequences += tree.fork(sequences[above])
        tree.extend(sequences[-1], tokens)
    return tree, sequences


def _integers(name: str, values: Sequence[int]) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(f"tree_from_parents: {name} must be a list of integers, got {values!r}") from error
