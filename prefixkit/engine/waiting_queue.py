"""The queue of requests that wait for pages, or for their turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from prefixkit.engine.request import Request
from prefixkit.engine.request_state import RequestState


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
