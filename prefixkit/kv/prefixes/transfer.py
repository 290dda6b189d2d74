"""Prefixes of a KV store, written to a file and read from one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefixkit.kv.prefixes.file import PrefixFile, open_prefixes
from prefixkit.kv.prefixes.trie import trie_of
from prefixkit.kv.prefixes.write import write_prefixes
from prefixkit.kv.store import KVStore
from prefixkit.tree.pages import OutOfPages, pages_for
from prefixkit.tree.radix import Sequence as TreeSequence


def save_prefixes(store: KVStore, path: str | Path, sequences: Sequence[TreeSequence], fingerprint: str) -> int:
    """Write the KV of sequences whose tokens are all computed; returns how many distinct tokens that were."""
    trie, sources = trie_of([sequence.tokens() for sequence in sequences])
    slots = [sequence.slots() for sequence in sequences]
    places = zip(sources.tolist(), trie.starts.tolist(), trie.lengths.tolist(), strict=True)
    of_trie = np.concatenate([slots[source][start : start + length] for source, start, length in places])

    def kv(begin: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = torch.cat(store.pool.read(of_trie[begin:end])).movedim(0, 2)
        return keys, values

    write_prefixes(path, trie, kv, store.pool.spec, fingerprint)
    return len(of_trie)


def load_prefixes(store: KVStore, path: str | Path, fingerprint: str, vocab: int) -> int:
    """Read prefixes into the prefix cache; returns how many tokens were read that it did not have.

    Raises:
        PrefixFileError: the file is torn or of something else; nothing of it stays in the tree.
        KVBudgetTooSmall: the store does not hold them all; nothing was read.
    """
    with open_prefixes(path, store.pool.spec, fingerprint, vocab) as file:
        _check_fits(store, file)
        try:
            return _load_all(store, file)
        except OutOfPages:  # what was found of them may lie on more pages than they need
            store.cache.clear()
            return _load_all(store, file)


def _check_fits(store: KVStore, file: PrefixFile) -> None:
    """Raise KVBudgetTooSmall unless all prefixes fit beside what is pinned, or begin as that does."""
    trie, budget, need = file.trie, store.budget(), 0
    for node, (start, length) in enumerate(zip(trie.starts.tolist(), trie.lengths.tolist(), strict=True)):
        pinned = budget.tokens_pinned(trie.prefix(node)) if budget.pins else 0
        need += pages_for(min(length, max(0, start + length - pinned)), store.tree.page_size)
    if need > budget.pages:
        raise budget.error(f"{file.path}", need, "save fewer prefixes")


def _load_all(store: KVStore, file: PrefixFile) -> int:
    """Read all prefixes, or none: returns how many tokens had no KV."""
    held = list[TreeSequence]()  # until all are there, or one would be evicted for the next
    let_go = store.tree.release
    try:
        read = sum(_load(store, file, leaf, held) for leaf in file.trie.leaves().tolist())
        let_go = store.retain
    finally:
        for sequence in held:
            let_go(sequence)
    return read


def _load(store: KVStore, file: PrefixFile, leaf: int, held: list[TreeSequence]) -> int:
    """Read the tokens from the root to a leaf, as far as they have no KV yet, and hold their sequence."""
    tokens = file.trie.prefix(leaf)
    sequence = store.admit(tokens, alone=True)
    assert sequence is not None, "admitted alone"
    held.append(sequence)
    begin = sequence.computed
    slots, path = sequence.slots(), list[int]()
    while leaf >= 0:
        path.append(leaf)
        leaf = int(file.trie.parents[leaf])
    for node in path[::-1]:
        start, (first, last) = int(file.trie.starts[node]), file.trie.span(node)
        skip = min(max(0, begin - start), last - first)
        if first + skip < last:
            kv = torch.stack(file.read(first + skip, last)).movedim(2, 0)
            own = slice(start + skip, start + last - first)
            store.pool.write(slots[own], [kv], np.arange(len(kv)))
    above = sequence.node
    while above.parent is not None and above.start + above.length > begin:
        store.tree.mark_computed([above], [above.length])
        above = above.parent
    return len(tokens) - begin
