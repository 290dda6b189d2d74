"""Prefixes of a session's pool, written to a file and read from one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.engine import Engine
from prefixkit.engine.prefixes.file import PrefixFile, open_prefixes
from prefixkit.engine.prefixes.trie import trie_of
from prefixkit.engine.prefixes.write import write_prefixes
from prefixkit.engine.scheduler import KVBudgetTooSmall
from prefixkit.tree.pages import OutOfPages, pages_for
from prefixkit.tree.radix import Sequence as TreeSequence
from prefixkit.tree.tokens import common_prefix

Ints = NDArray[np.int32]


def save_prefixes(engine: Engine, path: str | Path, sequences: Sequence[TreeSequence], fingerprint: str) -> int:
    """Write the KV of sequences whose tokens are all computed; returns how many distinct tokens that were."""
    trie, sources = trie_of([sequence.tokens() for sequence in sequences])
    slots = [sequence.slots() for sequence in sequences]
    places = zip(sources.tolist(), trie.starts.tolist(), trie.lengths.tolist(), strict=True)
    of_trie = np.concatenate([slots[source][start : start + length] for source, start, length in places])

    def kv(begin: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = torch.cat(engine.pool.read(of_trie[begin:end])).movedim(0, 2)
        return keys, values

    write_prefixes(path, trie, kv, engine.pool.spec, fingerprint)
    return len(of_trie)


def load_prefixes(engine: Engine, path: str | Path, fingerprint: str, vocab: int) -> int:
    """Read prefixes into the prefix cache; returns how many tokens were read that it did not have.

    Raises:
        PrefixFileError: the file is torn or of something else; nothing of it stays in the tree.
        KVBudgetTooSmall: the pool does not hold them all; nothing was read.
    """
    with open_prefixes(path, engine.pool.spec, fingerprint, vocab) as file:
        _check_fits(engine, file)
        try:
            return _load_all(engine, file)
        except OutOfPages:  # what was found of them may lie on more pages than they need
            engine.cache.clear()
            return _load_all(engine, file)


def _check_fits(engine: Engine, file: PrefixFile) -> None:
    """Raise KVBudgetTooSmall unless all prefixes fit beside what is pinned, or begin as that does."""
    trie, page_size, pins = file.trie, engine.tree.page_size, [pin.tokens() for pin in engine.pins]
    need, have = 0, engine.tree.allocator.num_pages - engine.pinned_pages
    for node, (start, length) in enumerate(zip(trie.starts.tolist(), trie.lengths.tolist(), strict=True)):
        pinned = max((common_prefix(pin, trie.prefix(node)) for pin in pins), default=0)
        need += pages_for(min(length, max(0, start + length - pinned)), page_size)
    if need > have:
        raise KVBudgetTooSmall(
            f"the prefixes in {file.path} take {need} pages of {page_size} tokens, but the KV budget holds {have}"
            + (" beside pinned prefixes" if pins else "")
            + "; raise kv_budget, or save fewer prefixes"
        )


def _load_all(engine: Engine, file: PrefixFile) -> int:
    """Read all prefixes, or none: returns how many tokens had no KV."""
    held = list[TreeSequence]()  # until all are there, or one would be evicted for the next
    leave = engine.tree.release
    try:
        read = sum(_load(engine, file, leaf, held) for leaf in file.trie.leaves().tolist())
        leave = engine.cache.retain
    finally:
        for sequence in held:
            leave(sequence)
    return read


def _load(engine: Engine, file: PrefixFile, leaf: int, held: list[TreeSequence]) -> int:
    """Read the tokens from the root to a leaf, as far as they have no KV yet, and hold their sequence."""
    tree, cache, tokens = engine.tree, engine.cache, file.trie.prefix(leaf)
    found = tree.match(tokens)
    with cache.pinned(found.node):
        fits = cache.free_pages(pages_for(len(tokens) - found.length, tree.page_size))
    if not fits:
        cache.clear()  # what was found may be the beginning of a longer node
    sequence = tree.insert(tokens)
    held.append(sequence)
    begin = cache.record_hit(sequence)
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
            engine.pool.write(slots[own], [kv], np.arange(len(kv)))
    above = sequence.node
    while above.parent is not None and above.start + above.length > begin:
        tree.mark_computed([above], [above.length])
        above = above.parent
    return len(tokens) - begin
