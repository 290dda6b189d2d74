"""Save prefixes of a KV store to a file, and load them from one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefixkit.kv.prefixes.file import PrefixFile, open_prefixes
from prefixkit.kv.prefixes.front_coding import front_coded
from prefixkit.kv.prefixes.saved_states import held_states, restore_states
from prefixkit.kv.prefixes.write import Origin, write_prefixes
from prefixkit.kv.store import KVStore
from prefixkit.tree.pages import OutOfPages, pages_for
from prefixkit.tree.radix import Sequence as TreeSequence


def save_prefixes(store: KVStore, path: str | Path, sequences: Sequence[TreeSequence], origin: Origin) -> int:
    """Write the KV of sequences whose tokens are all computed, and the states of their nodes.

    Returns:
        How many distinct tokens were written.
    """
    prefixes, sources = front_coded([sequence.tokens() for sequence in sequences])
    pairs = zip(sources, prefixes.shared.tolist(), strict=True)
    slots = np.concatenate([sequences[source].slots()[shared:] for source, shared in pairs])

    def kv(begin: int, end: int) -> Tensor:
        return torch.cat(store.pool.read(slots[begin:end]))

    places, state_slots = held_states(store, sequences, prefixes, sources)

    def states(number: int, begin: int, end: int) -> Tensor:
        return store.pool.states.read_one(number, state_slots[begin:end])

    write_prefixes(path, prefixes, kv, store.pool.spec, origin, places, states)
    return len(slots)


def load_prefixes(store: KVStore, path: str | Path, origin: Origin, vocab: int) -> int:
    """Read prefixes into the prefix cache; returns how many tokens were read because the cache lacked them.

    Raises:
        PrefixFileError: the file is torn or of another model; nothing of it stays in the tree.  If states are torn,
            nothing has changed.
        KVBudgetTooSmall: the prefixes do not all fit the store; nothing was read.
    """
    file = open_prefixes(path, store.pool.spec, origin, vocab)
    _check_fits(store, file)
    for number in range(len(file.places.prefix)):  # before anything changes
        file.read_state(number)
    try:
        return _load_all(store, file)
    except OutOfPages:  # cached parts of the prefixes may lie on more pages than they need
        store.cache.clear()
        return _load_all(store, file)


def _check_fits(store: KVStore, file: PrefixFile) -> None:
    """Raise KVBudgetTooSmall unless all prefixes fit besides pinned ones, with which they may share tokens."""
    budget, need = store.budget(), 0
    for tokens, shared, _ in file.prefixes:
        need += pages_for(len(tokens) - max(shared, budget.tokens_pinned(tokens)), store.tree.page_size)
    if need > budget.pages:
        raise budget.error(f"{file.path}", need, "save fewer prefixes")


def _load_all(store: KVStore, file: PrefixFile) -> int:
    """Read all prefixes or none; returns how many tokens had no KV."""
    held, read = list[TreeSequence](), 0  # held until all are read: one might be evicted for the next
    end = store.tree.release
    try:
        for tokens, shared, begin in file.prefixes:
            sequence = store.admit(tokens, alone=True)
            assert sequence is not None, "admitted alone"
            held.append(sequence)
            known = sequence.computed  # at least the shared prefix, which is held
            if known < len(tokens):
                kv = file.read(begin + known - shared, begin + len(tokens) - shared)
                store.pool.write(sequence.slots()[known:], [kv], np.arange(len(kv)))
                read += len(kv)
            node = sequence.node
            while node.parent is not None and node.start + node.length > known:
                store.tree.mark_computed([node], [node.length])
                node = node.parent
        restore_states(store, file, held)
        end = store.retain
    finally:
        for sequence in held:
            end(sequence)
    return read
