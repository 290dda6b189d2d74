"""Which slots hold the states of nodes, for models with layers that keep a state in place of KV.

A state follows a number of a node's tokens: a checkpoint, from which later tokens go on without those before.  It is
written where a step ends, where the tree forks, and where a caller asks for one; and it is dropped, as long as nothing
goes on from it, when slots are needed: then its tokens run once more from the checkpoint before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from prefixkit.tree.arrays import Ints
from prefixkit.tree.node import Node

_RERUN = 64  # tokens that run once more as fast as the last one alone, about
_BATCH = 16  # at least 1 / _BATCH of the slots are freed at once: finding them reads the whole tree


class OutOfStateSlots(RuntimeError):
    """More states are needed at once than there are slots."""


class Piece(NamedTuple):
    """Consecutive tokens of a step that one state runs over.

    Attributes:
        row: The query row of the first.
        length: How many.
        source: Slot of the state before them; -1 at the beginning of a text.
        target: Slot that receives the state after them; -1 for none, where nothing goes on from it.
        wave: After how many other pieces of the step it runs.
    """

    row: int
    length: int
    source: int
    target: int
    wave: int


class _Need(NamedTuple):
    """Who reads the state after a run of a step.

    Attributes:
        stays: Whether it is read after the step, or by several runs of it.
        passes: Whether one run of the step goes on from it and nothing else does: where slots are short, that run
            writes its own state over it, so that a path takes one slot however many nodes it has.
        below: Slots that this one run needs, if this one's slot is not left to it.
        passed_on: Whether it is itself such a run.
    """

    stays: bool
    passes: bool
    below: int
    passed_on: bool

    @property
    def slots(self) -> int:
        """How many it takes at least."""
        return int(self.stays or self.passes)


def _needs(nodes: Sequence[Node], begin: Sequence[int], end: Sequence[int], goes_on: Sequence[bool]) -> list[_Need]:
    """Of each run of a step; see :meth:`StateSlots.plan`."""
    runs = dict(zip(nodes, range(len(nodes)), strict=True))
    below: list[list[int]] = [[] for _ in nodes]
    for run, (node, first) in enumerate(zip(nodes, begin, strict=True)):
        if first == 0 and node.parent in runs:
            below[runs[node.parent]].append(run)
    stays = [
        more
        or stop < node.length
        or len(own) > 1
        or any(one.computed == 0 and one not in runs for one in node.children)
        for node, stop, more, own in zip(nodes, end, goes_on, below, strict=True)
    ]
    passes = [len(own) == 1 and not stay for own, stay in zip(below, stays, strict=True)]
    slots = [stay or one for stay, one in zip(stays, passes, strict=True)]
    after = {own[0] for own, one in zip(below, passes, strict=True) if one}
    rows = enumerate(zip(stays, passes, below, strict=True))
    return [_Need(stay, one, int(one and slots[own[0]]), run in after) for run, (stay, one, own) in rows]


@dataclass(frozen=True, eq=False)
class StateMoves:
    """What the layers that keep a state do in a step.

    Attributes:
        pieces: Of all query rows.
        made: The node, and after how many of its tokens, of each slot that is written.
    """

    pieces: list[Piece]
    made: list[tuple[Node, int, int]]

    def repeated(self) -> StateMoves:
        """Those of the decode step after this one: each row's state goes on in its slot."""
        pieces = [piece._replace(length=1, source=piece.target, wave=0) for piece in self.pieces]
        return StateMoves(pieces, [])

    def select_rows(self, rows: Iterable[int]) -> StateMoves:
        """Those of a decode step of these rows, which are pieces, ascending."""
        return StateMoves([self.pieces[row]._replace(row=i) for i, row in enumerate(rows)], [])


class StateSlots:
    """The slots of a tree.

    Args:
        root: Of the tree.
        included: By id, the sequences that go on, which pinned ones do not.
        count: Slots that there are.

    Attributes:
        every: After how many tokens of a text there is a checkpoint, where nothing else asks for one.
        ahead: Whether rows whose runs have ended may have run on meanwhile: then their states are after other tokens.
    """

    def __init__(self, root: Node, included: Mapping[int, object], count: int = 0, every: int = sys.maxsize) -> None:
        self.root, self.included, self.count, self.every, self.ahead = root, included, 0, every, False
        self._free: list[int] = []
        self._busy = set[int]()  # of the step that is being planned
        self.grow(count)

    def grow(self, count: int) -> None:
        """Have ``count`` slots, no fewer than before."""
        self._free += range(self.count + 1, count + 1)  # slot 0 is for rows of steps that are none
        self.count = max(self.count, count)

    def plan(
        self, nodes: Sequence[Node], begin: Ints, end: Ints, goes_on: Sequence[bool], ends: Sequence[bool]
    ) -> StateMoves:
        """The pieces of a step whose query runs are tokens ``[begin, end)`` of ``nodes``, in depth-first order.

        Args:
            nodes, begin, end: A state exists before each run, or is made in this step.
            goes_on: Of each run, whether more tokens follow its last.
            ends: Whether a prompt ends with it: the state before its last token is kept too, for one that is equal.

        Raises:
            OutOfStateSlots: nothing has changed except for states that nothing goes on from.
        """
        pieces, made = list[Piece](), list[tuple[Node, int, int]]()
        last, passed = dict[Node, Piece](), dict[Node, int]()
        firsts, stops = begin.tolist(), end.tolist()
        needs = _needs(nodes, firsts, stops, goes_on)
        row, to_come = 0, sum(need.slots for need in needs if not need.passed_on)
        # No state that a later run of the step begins with makes room for what an earlier one writes.
        runs = set(nodes)
        begins = [(node, first) for node, first in zip(nodes, firsts, strict=True) if first or node.parent not in runs]
        self._busy = {node.state_at(first) for node, first in begins}
        for node, first, stop, need, prompt in zip(nodes, firsts, stops, needs, ends, strict=True):
            above = last.get(node.parent) if first == 0 and node.parent is not None else None
            source = node.state_at(first) if above is None else above.target
            assert source >= 0 or node.start + first == 0, f"no state after {first} tokens of {node}"
            own = passed.get(node.parent, -1) if need.passed_on and node.parent is not None else -1
            to_come -= need.slots if own < 0 else 0
            wave = 0 if above is None else above.wave + 1
            in_place = first > 0 and first == node.computed and not prompt and source >= 0
            at = first
            for offset in [*self._checkpoints(node, first, stop, prompt), stop]:
                if in_place and offset == stop and at == first:
                    slot = source
                elif offset == stop and own >= 0:
                    slot = own
                else:
                    slot = self._take(need.stays and offset == stop, leave=to_come + (own < 0) * need.slots)
                if slot < 0 and offset < stop:
                    continue
                if slot < 0 and need.passes:
                    slot = own = self._take(needed=True)
                if slot >= 0 and offset == stop and slot == own and need.passes:
                    passed[node] = slot  # until the run below writes its own state there, and no node's meanwhile
                elif slot >= 0:
                    made.append((node, offset, slot))
                piece = last[node] = Piece(row, offset - at, source, slot, wave)
                pieces.append(piece)
                row, at, source, wave = row + offset - at, offset, slot, wave + 1
            to_come += need.below if need.passes and node not in passed else 0
            if in_place and pieces[-1].target == pieces[-1].source:
                node.state = -1  # it changes now, and is the node's again once the step is under way
        return StateMoves(pieces, made)

    def _checkpoints(self, node: Node, first: int, stop: int, prompt: bool) -> list[int]:
        """After how many tokens a run of a node has states beside the last, where there are slots."""
        wanted = {at for at, slot in node.checkpoints.items() if slot < 0 and first < at < stop}
        wanted |= {stop - 1} if prompt and stop - first > _RERUN else set()
        wanted.update(range(self.every - (node.start + first) % self.every + first, stop, self.every))
        return sorted(wanted)

    def commit(self, moves: StateMoves) -> None:
        """Note the states of a step that was launched, whose tokens are marked computed."""
        for node, offset, slot in moves.made:
            if node.parent is not None:
                name(node, offset, slot)

    @property
    def used(self) -> int:
        """How many slots nodes name."""
        return sum(len(node.states) for node in self._nodes())

    def spare(self, most: int, stay: Iterable[int] = ()) -> list[int]:
        """At most this number of slots, which :func:`name` gives to nodes once the caller has written states to them.

        States that nothing goes on from are dropped for them, except for those in slots that ``stay``.
        """
        self._busy = set(stay)
        return [*takewhile(lambda slot: slot >= 0, (self._take(needed=False) for _ in range(most)))]

    def _take(self, needed: bool, leave: int = 0) -> int:
        """A free slot; -1 where there are only ``leave`` or fewer, unless it is ``needed``."""
        leave = 0 if needed else leave
        if len(self._free) <= leave:
            self._collect(1 + leave)
        if len(self._free) <= leave:
            if needed:
                raise OutOfStateSlots(f"all {self.count} slots for states of recurrent layers are in use at once")
            return -1
        slot = self._free.pop()
        self._busy.add(slot)
        return slot

    def _collect(self, least: int) -> None:
        """Find the slots that no node names; where they are few, drop states that nothing goes on from.

        Those at the ends of pinned prefixes go last.
        """
        used, spare = set(self._busy), list[tuple[bool, int, int, Node]]()
        for node in self._nodes():
            goes_on = any(child.computed == 0 for child in node.children)
            goes_on |= not node.sequences.keys().isdisjoint(self.included)
            for offset, slot in ((node.computed, node.state), *node.checkpoints.items()):
                if slot >= 0:
                    used.add(slot)
                    at_end = offset == node.computed
                    if slot not in self._busy and not (goes_on and at_end):
                        spare.append((at_end and bool(node.sequences), node.used_at, -offset, node))
        self._free = [slot for slot in range(1, self.count + 1) if slot not in used]
        lacking = max(least, self.count // _BATCH) - len(self._free)
        for _, _, offset, node in sorted(spare, key=lambda one: one[:3])[: max(0, lacking)]:
            self._free.append(_drop(node, -offset))

    def _nodes(self) -> list[Node]:
        nodes = [self.root]
        for node in nodes:  # the list grows while it is read
            nodes.extend(node.children)
        return nodes


def name(node: Node, offset: int, slot: int) -> None:
    """Note in which slot the state after the first ``offset`` tokens of a node is, of those that are computed."""
    if offset == node.computed:
        node.state = slot
    else:
        node.checkpoints[offset] = slot


def _drop(node: Node, offset: int) -> int:
    """Drop the state of a node after some of its tokens; returns its slot."""
    if offset == node.computed and node.state >= 0:
        slot, node.state = node.state, -1
        return slot
    return node.checkpoints.pop(offset)


def want(node: Node, positions: Iterable[int]) -> None:
    """Ask for states after these numbers of a sequence's tokens, which ends at ``node``."""
    for position in positions:
        above = node
        while above.start >= position and above.parent is not None:
            above = above.parent
        offset = position - above.start
        if 0 < offset < above.length and offset != above.computed:
            above.checkpoints.setdefault(offset, -1)
