"""Which slots hold the states of nodes, for models with layers that keep a state in place of KV.

A state belongs to a node and a number of its tokens: it is a checkpoint, from which later tokens run without the tokens
before it.  States are written where a step ends, where the tree forks, and where a caller asks for one.  A state that
nothing continues from is dropped when slots are needed: its tokens then rerun from the checkpoint before it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from prefixkit.tree.arrays import Ints
from prefixkit.tree.node import Node

_RERUN = 64  # about this many tokens rerun in the time of one
_BATCH = 16  # at least 1 / _BATCH of the slots are freed at once: finding them reads the whole tree


class OutOfStateSlots(RuntimeError):
    """More states are needed at once than there are slots."""


class Piece(NamedTuple):
    """Consecutive tokens of a step through which one state is advanced.

    Attributes:
        row: The query row of the first token.
        length: Number of tokens.
        source: Slot of the state before them; -1 at the beginning of a text.
        target: Slot that receives the state after them; -1: that state is not stored, as nothing continues from it.
        wave: How many other pieces of the step must run before this one, one after another.
    """

    row: int
    length: int
    source: int
    target: int
    wave: int


class _Need(NamedTuple):
    """What reads the state after a run of a step.

    Attributes:
        stays: Whether the state is read after the step, or by several runs of the step.
        passes: Whether one run of the step continues from the state and nothing else does: if slots are short, that run
            overwrites it with its own state, so that a path takes one slot however many nodes it has.
        below: Slots that this one run needs if the slot is not passed on to it.
        passed_on: Whether the parent's state passes to this run.
    """

    stays: bool
    passes: bool
    below: int
    passed_on: bool

    @property
    def slots(self) -> int:
        """The fewest slots that the run needs."""
        return int(self.stays or self.passes)


def _needs(nodes: Sequence[Node], begin: Sequence[int], end: Sequence[int], goes_on: Sequence[bool]) -> list[_Need]:
    """The need of each run of a step; see :meth:`StateSlots.plan`."""
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
    """How the layers that keep a state process a step.

    Attributes:
        pieces: The pieces, which cover all query rows.
        made: For each slot that is written: the node, the number of its tokens that the state follows, and the slot.
    """

    pieces: list[Piece]
    made: list[tuple[Node, int, int]]

    def repeated(self) -> StateMoves:
        """The moves of the decode step after this one: each row advances the state in its slot."""
        pieces = [piece._replace(length=1, source=piece.target, wave=0) for piece in self.pieces]
        return StateMoves(pieces, [])

    def select_rows(self, rows: Iterable[int]) -> StateMoves:
        """The moves of a decode step of only these rows, ascending; each row is a piece."""
        return StateMoves([self.pieces[row]._replace(row=i) for i, row in enumerate(rows)], [])


class StateSlots:
    """The slots of a tree.

    Args:
        root: The root of the tree.
        included: The sequences that will continue, by id; pinned ones do not.
        count: Number of slots.

    Attributes:
        every: The distance between a text's checkpoints, in tokens, where nothing else asks for one.
        ahead: Whether rows of finished runs may have run further meanwhile: their states then follow other tokens.
    """

    def __init__(self, root: Node, included: Mapping[int, object], count: int = 0, every: int = sys.maxsize) -> None:
        self.root, self.included, self.count, self.every, self.ahead = root, included, 0, every, False
        self._free: list[int] = []
        self._busy = set[int]()  # slots used by the step that is being planned
        self.grow(count)

    def grow(self, count: int) -> None:
        """Grow to ``count`` slots; a smaller number changes nothing."""
        self._free += range(self.count + 1, count + 1)  # slot 0 is for padding rows of steps
        self.count = max(self.count, count)

    def plan(
        self, nodes: Sequence[Node], begin: Ints, end: Ints, goes_on: Sequence[bool], ends: Sequence[bool]
    ) -> StateMoves:
        """The pieces of a step whose query runs are tokens ``[begin, end)`` of ``nodes``, in depth-first order.

        Args:
            nodes, begin, end: The runs.  The state before each run exists, or is made in this step.
            goes_on: For each run, whether more tokens will follow its last.
            ends: For each run, whether a prompt ends with it: the state before its last token is then stored too, for
                a later equal prompt.

        Raises:
            OutOfStateSlots: nothing has changed, except that states which nothing continues from may be dropped.
        """
        pieces, made = list[Piece](), list[tuple[Node, int, int]]()
        last, passed = dict[Node, Piece](), dict[Node, int]()
        firsts, stops = begin.tolist(), end.tolist()
        needs = _needs(nodes, firsts, stops, goes_on)
        row, to_come = 0, sum(need.slots for need in needs if not need.passed_on)
        # A state that a later run of the step begins with must not be dropped to store the state of an earlier run.
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
                    slot = self._allocate(need.stays and offset == stop, leave=to_come + (own < 0) * need.slots)
                if slot < 0 and offset < stop:
                    continue
                if slot < 0 and need.passes:
                    slot = own = self._allocate(needed=True)
                if slot >= 0 and offset == stop and slot == own and need.passes:
                    passed[node] = slot  # until the run below overwrites it; no node names the slot meanwhile
                elif slot >= 0:
                    made.append((node, offset, slot))
                piece = last[node] = Piece(row, offset - at, source, slot, wave)
                pieces.append(piece)
                row, at, source, wave = row + offset - at, offset, slot, wave + 1
            to_come += need.below if need.passes and node not in passed else 0
            if in_place and pieces[-1].target == pieces[-1].source:
                node.state = -1  # the step overwrites the slot; `commit` gives it back to the node
        return StateMoves(pieces, made)

    def _checkpoints(self, node: Node, first: int, stop: int, prompt: bool) -> list[int]:
        """The numbers of tokens after which a run of a node stores a state besides its last, if slots are free."""
        wanted = {at for at, slot in node.checkpoints.items() if slot < 0 and first < at < stop}
        wanted |= {stop - 1} if prompt and stop - first > _RERUN else set()
        wanted.update(range(self.every - (node.start + first) % self.every + first, stop, self.every))
        return sorted(wanted)

    def commit(self, moves: StateMoves) -> None:
        """Record the states of a step that was launched, and whose tokens are marked computed."""
        for node, offset, slot in moves.made:
            if node.parent is not None:
                name(node, offset, slot)

    @property
    def used(self) -> int:
        """How many slots hold a state of a node."""
        return sum(len(node.states) for node in self._nodes())

    def spare(self, most: int, stay: Iterable[int] = ()) -> list[int]:
        """At most ``most`` free slots; the caller writes states to them and assigns them to nodes with :func:`name`.

        States that nothing continues from are dropped to free slots, except for those in the slots ``stay``.
        """
        self._busy = set(stay)
        return [*takewhile(lambda slot: slot >= 0, (self._allocate(needed=False) for _ in range(most)))]

    def _allocate(self, needed: bool, leave: int = 0) -> int:
        """Take a free slot; -1 if only ``leave`` or fewer are free, unless it is ``needed``."""
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
        """Find the slots that no node has a state in; if they are few, drop states that nothing continues from.

        States at the ends of pinned prefixes are dropped last.
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
    """Record the slot of the state after a node's first ``offset`` tokens, which are computed."""
    if offset == node.computed:
        node.state = slot
    else:
        node.checkpoints[offset] = slot


def _drop(node: Node, offset: int) -> int:
    """Drop the state after the first ``offset`` tokens of a node; returns its slot."""
    if offset == node.computed and node.state >= 0:
        slot, node.state = node.state, -1
        return slot
    return node.checkpoints.pop(offset)


def want(node: Node, positions: Iterable[int]) -> None:
    """Ask for states after these numbers of tokens of the sequence that ends at ``node``."""
    for position in positions:
        above = node
        while above.start >= position and above.parent is not None:
            above = above.parent
        offset = position - above.start
        if 0 < offset < above.length and offset != above.computed:
            above.checkpoints.setdefault(offset, -1)
