"""Which tree the KV in a pool belongs to: a second tree would write to the same pages."""

from __future__ import annotations

import gc
from weakref import WeakKeyDictionary, ref

from prefixkit.functional.given_pages import GivenPages
from prefixkit.kv.kv_pool import KVPool
from prefixkit.tree.radix import PrefixTree

# For each pool, the tree that was made or planned over it last.
_owners: WeakKeyDictionary[KVPool | GivenPages, ref[PrefixTree]] = WeakKeyDictionary()


def claim(verb: str, pool: KVPool | GivenPages, tree: PrefixTree) -> None:
    """Let a pool hold the KV of this tree; an earlier tree without pages loses it.

    Raises ValueError, in the name of ``verb``, if another tree has pages in the pool.
    """
    before = _owners.get(pool)
    if before is not None and before() is tree:
        return
    if before is not None and _holds_pages(before):
        gc.collect()  # a tree and its nodes are a reference cycle
        if _holds_pages(before):
            raise ValueError(
                f"{verb}: another tree has sequences, or retains KV, in this pool, which would be overwritten; insert "
                "into that tree, release its sequences or delete it with them, or make another pool"
            )
    _owners[pool] = ref(tree)


def _holds_pages(tree: ref[PrefixTree]) -> bool:
    found = tree()
    return found is not None and found.allocator.free < found.allocator.num_pages
