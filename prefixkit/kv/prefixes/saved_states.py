"""Choose the states of a KV store that a prefix file stores, and restore a file's states into slots of a store."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from prefixkit.kv.prefixes.file import PrefixFile
from prefixkit.kv.prefixes.front_coding import FrontCoded
from prefixkit.kv.prefixes.write import StatePlaces
from prefixkit.kv.store import KVStore
from prefixkit.tree.arrays import Longs
from prefixkit.tree.node import Node
from prefixkit.tree.radix import Sequence as TreeSequence
from prefixkit.tree.state_slots import name

log = logging.getLogger("prefixkit")

# States in a file for each sequence: at its end, before its last token, and where it diverges from others.
_STATES_PER_SEQUENCE = 3


def held_states(
    store: KVStore, sequences: Sequence[TreeSequence], prefixes: FrontCoded, sources: Sequence[int]
) -> tuple[StatePlaces, Longs]:
    """The states of sequences in the tree, most important first, and their slots.

    States at ends of sequences come first, then those before the last tokens, then those where the tree forks, then
    others.  At most :data:`_STATES_PER_SEQUENCE` per sequence, plus one per ``store.tokens_per_checkpoint`` tokens.

    Args:
        store: Where the sequences live.
        sequences: All their tokens are computed.
        prefixes, sources: As :func:`front_coded` returns them.
    """
    ranks: dict[int, int] = {}  # by slot
    for rank, back in enumerate((0, 1)):
        for sequence in sequences:
            ranks.setdefault(sequence.node.state_at(sequence.node.length - back), rank)
    found = list[tuple[int, int, int, int]]()
    pairs = zip(sources, prefixes.shared.tolist(), strict=True)
    for number, (source, shared) in enumerate(pairs):
        for node in sequences[source].path():
            for offset in node.states:
                slot, forks = node.state_at(offset), offset == node.length and len(node.branches) > 1
                if (position := node.start + offset) > shared:
                    found.append((ranks.get(slot, 2 if forks else 3), number, position, slot))
    ends = len({sequence.node for sequence in sequences})
    lacking = ends - sum(rank == 0 for rank, *_ in found)
    if store.tree.states is not None and lacking > 0:
        log.info("prefix file: %d of %d prefixes have no state at their ends: few slots are there", lacking, ends)
    most = _STATES_PER_SEQUENCE * len(sequences) + len(prefixes.tokens) // store.tokens_per_checkpoint
    columns = np.array(sorted(found)[:most], np.int64).reshape(-1, 4).T
    return StatePlaces(columns[1], columns[2]), columns[3]


def restore_states(store: KVStore, file: PrefixFile, sequences: Sequence[TreeSequence]) -> None:
    """Restore the states of a file that nodes lack, as far as slots are free.

    Args:
        store: Where ``sequences`` live: the file's prefixes, whose tokens are all computed.
    """
    states = store.tree.states
    if states is None:
        return
    places = [_place(sequences[p], at) for p, at in zip(file.places.prefix, file.places.position.tolist(), strict=True)]
    store.have_slots(len(places), 0)
    there = [node.state_at(offset) for node, offset in places]
    lacking = [number for number, slot in enumerate(there) if slot < 0]
    slots = states.spare(len(lacking), (slot for slot in there if slot >= 0))
    for number, slot in zip(lacking, slots, strict=False):
        store.pool.states.write(np.array([slot]), file.read_state(number))
        name(*places[number], slot)
    if len(slots) < len(lacking):
        log.info(
            "prefix file: no slot for %d of %d states: tokens after the states before them run once more",
            len(lacking) - len(slots),
            len(places),
        )


def _place(sequence: TreeSequence, position: int) -> tuple[Node, int]:
    """The node that holds a sequence's token before ``position``, and how many of its tokens end at ``position``."""
    node = next(node for node in sequence.path() if node.start < position)
    return node, position - node.start
