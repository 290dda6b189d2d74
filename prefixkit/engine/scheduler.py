"""Admission: prompts wait until there are pages for what they need now.

Nothing here runs a model.  What runs may grow beyond the pool later: then the request admitted last is preempted
(`prefixkit.engine.preemption`), and waits again.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.request import BeamParams, Request
from prefixkit.kv.budget import Budget
from prefixkit.kv.store import KVStore
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import Sequence


@dataclass(eq=False, slots=True)
class RequestState:
    """A request from its submission to its last sample.

    Attributes:
        request: What is asked.
        order: Its place among all requests ever submitted.
        waits_since: The step at which it was submitted, or preempted.
        prompt: Its prompt in the tree, while it is in flight.
        started, finished: How many of its samples, or beam searches, have started and finished.
        running: How many are running.
        suspended: Those that were preempted, in the order in which they started.
        first_logits: ``[vocab]`` the logits after the prompt's last token, while it is in flight.
    """

    request: Request
    order: int
    waits_since: int = 0
    prompt: Sequence | None = None
    started: int = 0
    finished: int = 0
    running: int = 0
    suspended: list[Any] = field(default_factory=list)
    first_logits: Tensor | None = None

    @property
    def sequence(self) -> Sequence:
        """Its prompt's, while it is in flight."""
        assert self.prompt is not None, "it waits"
        return self.prompt

    @property
    def wanted(self) -> int:
        """How many samples it has; a beam search is one."""
        return len(self.request.sample_indices)

    @property
    def wants_logits(self) -> bool:
        """Whether samples are to start for which its prompt's logits are missing."""
        return self.first_logits is None and self.started < self.wanted

    @property
    def ready(self) -> bool:
        """Whether a sample could start, or go on, if there were pages for it."""
        return bool(self.suspended) or (self.started < self.wanted and self.first_logits is not None)

    @property
    def waits(self) -> bool:
        """Whether some of its samples are not running yet, or no longer."""
        return bool(self.suspended) or self.started < self.wanted


def pages_per_unit(params: SamplingParams | BeamParams, page_size: int) -> int:
    """Pages that one sample, or one beam search, needs beyond its prompt to run to its end.

    The last token sampled needs no KV.  Beams fork at any token, and each fork may start a fresh page; but a search
    that runs out of pages is preempted, and each of its beams comes back on pages that are full but for the last.
    Beside them it then needs pages for the tokens that join the tree at once, and for the next ones.
    """
    tokens = params.max_new_tokens - 1
    if isinstance(params, BeamParams):
        return params.num_beams * min(tokens, pages_for(tokens, page_size) + 2)
    return pages_for(tokens, page_size)


def check_fits(requests: Iterable[Request], budget: Budget) -> None:
    """Raise KVBudgetTooSmall, before anything starts, if some request cannot run to its end even alone."""
    for request in requests:
        unit = pages_per_unit(request.params, budget.tree.page_size)
        if pages := budget.pages_lacking(request.tokens, unit):
            what = f"{len(request.tokens)} prompt tokens, max_new_tokens={request.params.max_new_tokens}"
            beams = " or num_beams" if isinstance(request.params, BeamParams) else ""
            one = f"one sequence of prompt {request.prompt_index} ({what})"
            raise budget.error(one, pages, f"lower max_new_tokens{beams}")


def growth_of(params: SamplingParams | BeamParams, page_size: int, tokens: int) -> int:
    """Pages that a sample, or a search, may take with its next tokens, so many of each sequence."""
    most = min(params.max_new_tokens - 1, tokens)
    each = pages_for(most, page_size)
    return params.num_beams * each if isinstance(params, BeamParams) else each


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
        heapq.heappush(self._by_wait, (state.waits_since, state.order, entry, state))

    def next(self, waiting_since: int) -> RequestState:
        """The request that has waited longest, if it has for longer than since that step; else the most urgent one."""
        longest = self._first(self._by_wait)
        return longest if longest.waits_since < waiting_since else self._first(self._by_priority)

    def remove(self, state: RequestState) -> None:
        """A request waits no longer."""
        del self._waiting[state]

    def _first(self, heap: list[tuple[int, int, int, RequestState]]) -> RequestState:
        while self._waiting.get(heap[0][3]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3]


@dataclass(eq=False)
class Scheduler:
    """The queue of requests, and those in flight.

    Requests of a higher priority go first, then those submitted earlier; of one submission, in lexicographic order of
    their tokens: those that share a prefix follow each other.  One that has waited for more than the policy's
    ``patience`` goes before all others.  Results are independent of this order.

    Attributes:
        store: Where prompts are inserted.
        most_running: Samples, or beam searches, that run at once at most.
        policy: How long requests wait, and for how many tokens there must be pages.
        steps: Steps so far.
    """

    store: KVStore
    most_running: int = sys.maxsize
    policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    steps: int = 0
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    in_flight: list[RequestState] = field(default_factory=list)
    _orders: count[int] = field(default_factory=count)
    _of_prompts: dict[int, RequestState] = field(default_factory=dict)  # those in flight, by their prompts' sequences

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests that :func:`check_fits` has passed."""
        for request in admission_order(requests):
            self.queue.add(RequestState(request, next(self._orders), self.steps))

    @property
    def idle(self) -> bool:
        return not self.queue and not self.in_flight

    @property
    def waits(self) -> bool:
        """Whether something waits for pages, or for a place among those that run."""
        return bool(self.queue) or any(state.waits for state in self.in_flight)

    @property
    def places(self) -> int:
        """How many more samples may run."""
        return max(0, self.most_running - sum(state.running for state in self.in_flight))

    def growth(self) -> int:
        """Pages for the first tokens of prompts in flight of which nothing runs yet."""
        return sum(self.unit(state) for state in self.in_flight if not state.running)

    def unit(self, state: RequestState) -> int:
        """Pages for another sample's next tokens; of one that was preempted, for those that it has too."""
        if not state.suspended:
            return growth_of(state.request.params, self.store.tree.page_size, self.policy.longest)
        own = sum(pages_for(len(tokens) - 1, self.store.tree.page_size) for tokens in state.suspended[0].token_lists)
        return own + self.growth_back(state)

    def growth_back(self, state: RequestState) -> int:
        """Pages for the next tokens of the sample that comes back next, and for those that join the tree then."""
        run, size = state.suspended[0], self.store.tree.page_size
        following = min(run.tokens_left, self.policy.longest)
        if isinstance(state.request.params, BeamParams):
            return growth_of(state.request.params, size, following) + len(run.token_lists)
        held = len(run.tokens) - 1
        return pages_for(held + 1 + following, size) - pages_for(held, size)

    def admit(self, growth: int) -> None:
        """Insert waiting prompts until one does not fit.

        Args:
            growth: Pages that what runs may take with its next tokens.
        """
        places = self.places - sum(not state.running for state in self.in_flight)
        growth += self.growth() if self.queue else 0
        while self.queue and places > 0:
            state = self.queue.next(self.steps - self.policy.patience)
            if not self._insert(state, growth):
                return
            self.queue.remove(state)
            places, growth = places - 1, growth + self.unit(state)

    def retire(self, state: RequestState) -> None:
        """A request has finished: its prompt stays in the prefix cache."""
        self.in_flight.remove(state)
        self._keep(state)

    def put_back(self, state: RequestState) -> None:
        """Let a request wait again: its prompt stays in the prefix cache until its pages are needed."""
        self.in_flight.remove(state)
        self._keep(state)
        state.waits_since = self.steps
        self.queue.add(state)

    def close(self) -> None:
        """Release every prompt; what ran is the engine's to release."""
        for state in self.in_flight:
            self.store.tree.release(state.sequence)
        self.in_flight.clear()
        self._of_prompts.clear()
        self.queue = WaitingQueue()

    def _keep(self, state: RequestState) -> None:
        self._of_prompts.pop(state.sequence.id, None)
        self.store.retain(state.sequence)
        state.prompt = state.first_logits = None

    def _insert(self, state: RequestState, growth: int) -> bool:
        """Insert a prompt where it fits beside the growth of what runs; else the tree is only read."""
        lookahead, alone = growth + self.unit(state), not self.in_flight
        state.prompt = self.store.admit(state.request.tokens, lookahead, alone=alone)
        if state.prompt is None:
            return False
        state.first_logits = self._known_logits(state.prompt)
        self.in_flight.append(state)
        self._of_prompts[state.prompt.id] = state
        return True

    def _known_logits(self, prompt: Sequence) -> Tensor | None:
        """The first logits of an equal prompt in flight, if they have been computed: all that want them get them at
        once.
        """
        for end in prompt.node.sequences:
            state = self._of_prompts.get(end)
            if state is not None and (state.first_logits is not None or state.wants_logits):
                return state.first_logits
        return None
