"""Requests on their way through the loop, and the queue of those that wait for pages, or for their turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from prefixkit.engine.request import Request
from prefixkit.tree.radix import Sequence


@dataclass(eq=False, slots=True)
class RequestState:
    """A request from its submission to its last sample.

    Attributes:
        request: What is asked.
        order: Its rank among all requests of the call.
        waiting_since: The step at which it was submitted, or preempted.
        prompt: Its prompt in the tree, while it is in flight.
        started, finished: How many of its runs have started and finished.
        running: How many are running.
        preempted: Those that were preempted, in the order in which they started.
        forks: Where later requests of its submission part from its prompt: after how many tokens.
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
        """Its prompt's, while it is in flight."""
        assert self.prompt is not None, "it waits"
        return self.prompt

    @property
    def wanted(self) -> int:
        """How many runs it has: samples, or one beam search."""
        return len(self.request.sample_indices)

    @property
    def wants_logits(self) -> bool:
        """Whether runs are to start for which its prompt's logits are missing."""
        return self.first_logits is None and self.started < self.wanted

    @property
    def ready(self) -> bool:
        """Whether a run could start, or go on, if there were pages for it."""
        return bool(self.preempted) or (self.started < self.wanted and self.first_logits is not None)

    @property
    def has_waiting(self) -> bool:
        """Whether some of its runs are not running yet, or no longer."""
        return bool(self.preempted) or self.started < self.wanted


def admission_order(requests: Iterable[Request]) -> list[Request]:
    """Requests in lexicographic order of their tokens."""
    # Big-endian bytes compare like the tokens themselves.
    return sorted(requests, key=lambda request: (request.tokens.astype(">u4").tobytes(), request.prompt_index))


class WaitingQueue:
    """Requests that wait, by priority and by the step since which they wait.

    A request that has left the queue stays in both heaps until it comes to their top.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestState, int] = {}  # and the number of its entry
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
        """The request that has waited longest, if it has for longer than since that step; else the most urgent one."""
        longest = self._first(self._by_wait)
        return longest if longest.waiting_since < waiting_since else self._first(self._by_priority)

    def remove(self, state: RequestState) -> None:
        """A request waits no longer."""
        del self._waiting[state]

    def _first(self, heap: list[tuple[int, int, int, RequestState]]) -> RequestState:
        while self._waiting.get(heap[0][3]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3]
