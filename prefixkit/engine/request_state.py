"""Requests in the loop, and the queue of requests that wait for pages or for a free slot."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from prefixkit.engine.request import Request
from prefixkit.tree.node import Node
from prefixkit.tree.radix import Sequence

# Steps of prompts before the first sample starts: with more, a call would be without any result for long.
_MOST_STEPS = 16


@dataclass(eq=False, slots=True)
class RequestState:
    """A request from its submission to its last sample.

    Attributes:
        request: The request.
        order: Its rank among all requests of the call.
        waiting_since: The step at which it was submitted, or preempted.
        prompt: Its prompt in the tree, while it is in flight.
        started, finished: Number of its runs that have started, and that have finished.
        running: Number of its runs that are running.
        preempted: Its runs that are preempted, in the order in which they started.
        forks: Lengths of the prefixes of its prompt at which later requests of its submission fork from it.
        first_logits: ``[vocab]`` the logits after the prompt's last token, while it is in flight.
    """

    request: Request
    order: int
    waiting_since: int = 0
    prompt: Sequence | None = None
    forks: tuple[int, ...] = ()
    started: int = 0
    finished: int = 0
    running: int = 0
    preempted: list[Any] = field(default_factory=list)
    first_logits: Tensor | None = None

    @property
    def sequence(self) -> Sequence:
        """Its prompt's sequence, while it is in flight."""
        assert self.prompt is not None, "it waits"
        return self.prompt

    @property
    def wanted(self) -> int:
        """Number of its runs: its samples, or one beam search."""
        return len(self.request.sample_indices)

    @property
    def computed(self) -> bool:
        """Whether its prompt has KV, while it is in flight."""
        return self.sequence.node.computed == self.sequence.node.length

    @property
    def wants_logits(self) -> bool:
        """Whether runs have yet to start and the prompt's logits, which they need, are missing."""
        return self.first_logits is None and self.started < self.wanted

    @property
    def ready(self) -> bool:
        """Whether a run could start, or resume, if there were pages for it."""
        return bool(self.preempted) or (self.started < self.wanted and self.first_logits is not None)

    @property
    def has_waiting(self) -> bool:
        """Whether some of its runs have not started, or are preempted."""
        return bool(self.preempted) or self.started < self.wanted


def prompts_come_first(in_flight: Collection[RequestState], slots: int, chunk: int) -> bool:
    """Whether no run should start yet, where none runs: a few steps of ``chunk`` tokens compute the prompts that are
    left, and runs that are ready leave some of the ``slots`` free.

    A step of prompts alone samples nothing, so that the host prepares the next one while the device computes; with runs
    among its rows the host would wait for their tokens.  As many steps follow the last prompt either way.
    """
    if not 0 < _uncomputed(in_flight) <= _MOST_STEPS * chunk:
        return False
    return sum(state.wanted - state.started for state in in_flight if state.ready) < slots


def _uncomputed(in_flight: Collection[RequestState]) -> int:
    """How many tokens of prompts have no KV; those that prompts share count once."""
    seen = set[Node]()
    for state in in_flight:
        node: Node | None = state.sequence.node
        while node is not None and node not in seen:
            seen.add(node)
            node = node.parent
    return sum(node.length - node.computed for node in seen)


def admission_order(requests: Iterable[Request]) -> list[Request]:
    """Requests in lexicographic order of their tokens."""
    # Big-endian bytes compare like the tokens themselves.
    return sorted(requests, key=lambda request: (request.tokens.astype(">u4").tobytes(), request.prompt_index))


class WaitingQueue:
    """Waiting requests, ordered by priority and by the step at which they began to wait.

    The heaps drop a request that has left the queue only once it reaches their top.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestState, int] = {}  # each request and the number of its entry
        self._by_priority: list[tuple[int, int, int, RequestState]] = []
        self._by_wait: list[tuple[int, int, int, RequestState]] = []
        self._entries = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        entry = self._waiting[state] = next(self._entries)
        heapq.heappush(self._by_priority, (-state.request.priority, state.order, entry, state))
        heapq.heappush(self._by_wait, (state.waiting_since, state.order, entry, state))

    def next(self, waiting_since: int) -> RequestState:
        """The longest-waiting request if it began to wait before that step; else the one of the highest priority."""
        longest = self._first(self._by_wait)
        return longest if longest.waiting_since < waiting_since else self._first(self._by_priority)

    def remove(self, state: RequestState) -> None:
        """Remove a request from the queue."""
        del self._waiting[state]

    def _first(self, heap: list[tuple[int, int, int, RequestState]]) -> RequestState:
        while self._waiting.get(heap[0][3]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3]
