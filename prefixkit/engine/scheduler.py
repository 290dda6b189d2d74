"""Admission: prompts wait until their KV, and that of all their samples, is sure to fit.

Nothing here runs a model.  A sample is admitted only when the pages it may still need are free and reserved for no
other sequence, so a running sample never meets a full pool: prompts beyond the budget wait, and nothing fails.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from prefixkit.engine.request import BeamParams, Request
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.match import Match
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree, Sequence
from prefixkit.tree.tokens import common_prefix

log = logging.getLogger("prefixkit")


class KVBudgetTooSmall(ValueError):
    """The pool cannot hold even one sequence of some prompt."""


@dataclass(eq=False, slots=True)
class RequestState:
    """A prompt in flight, and how many of its samples have reserved pages, have started and have finished.

    ``first_logits`` are the logits after the prompt's last token: ``[vocab]``, kept while the request is in flight.
    """

    request: Request
    prompt: Sequence
    granted: int = 0
    started: int = 0
    finished: int = 0
    first_logits: Tensor | None = None

    @property
    def wanted(self) -> int:
        """How many units can be granted: samples, or the beam search as a whole."""
        params = self.request.params
        return params.n if isinstance(params, SamplingParams) else 1


@dataclass(eq=False)
class _PinnedPrefix:
    """A finished prompt's prefix that a waiting prompt shares, kept so that no token is computed twice."""

    sequence: Sequence
    first_logits: Tensor | None


def pages_per_unit(params: SamplingParams | BeamParams, page_size: int) -> int:
    """Pages that one sample, or one beam search, can come to need beyond its prompt.

    The last token sampled needs no KV.  Beams fork at any token, and each fork may start a fresh page.
    """
    tokens = params.max_new_tokens - 1
    if isinstance(params, BeamParams):
        return params.num_beams * tokens
    return pages_for(tokens, page_size)


def check_fits(requests: Iterable[Request], tree: PrefixTree, bytes_per_token: int) -> None:
    """Raise KVBudgetTooSmall, before anything starts, if some request can never be admitted."""
    have = tree.allocator.num_pages
    for request in requests:
        need = pages_for(len(request.tokens), tree.page_size) + pages_per_unit(request.params, tree.page_size)
        if need > have:
            page_bytes = tree.page_size * bytes_per_token
            raise KVBudgetTooSmall(
                f"prompt {request.prompt_index} needs KV for {need * tree.page_size} tokens "
                f"({need * page_bytes / 2**20:.1f} MiB) to run even one sequence ({len(request.tokens)} prompt tokens, "
                f"max_new_tokens={request.params.max_new_tokens}, pages of {tree.page_size}), but the KV budget holds "
                f"{have * tree.page_size} tokens ({have * page_bytes / 2**20:.1f} MiB); "
                "raise kv_budget, or lower max_new_tokens, or page_size (each fork of a beam may take a page)"
            )


def admission_order(requests: Iterable[Request]) -> list[Request]:
    """Requests in lexicographic order of their tokens."""
    # Big-endian bytes compare like the tokens themselves.
    return sorted(requests, key=lambda request: (request.tokens.astype(">u4").tobytes(), request.prompt_index))


@dataclass(eq=False)
class _Budget:
    """What one round of admission may grant.

    Attributes:
        reserved: Pages of the free ones that are reserved: for running samples, and for granted ones that have not
            started.
        places: How many more samples, or beam searches, may run.
    """

    reserved: int
    places: int


@dataclass(eq=False)
class Scheduler:
    """The queue of prompts, the requests in flight, and the prefix kept for those that wait.

    Prompts are admitted in lexicographic order of their tokens: those that share a prefix follow each other, and a
    prompt that is another's prefix comes first.  Results are independent of this order.

    Attributes:
        tree: Where prompts are inserted.
        reserved_pages: Returns the pages that running samples may still take.
        most_running: Samples, or beam searches, that run at once at most.
        tokens_left: Returns how many tokens a sequence of the tree may still grow by: 0 for prompts and beams.
    """

    tree: PrefixTree
    reserved_pages: Callable[[], int]
    most_running: int = sys.maxsize
    tokens_left: Callable[[Sequence], int] = lambda sequence: 0
    queue: deque[Request] = field(default_factory=deque)
    _in_flight: dict[int, RequestState] = field(
        default_factory=dict
    )  # by the id of the prompt's sequence, in order of admission
    _short: deque[RequestState] = field(default_factory=deque)  # those of which samples wait, in order of admission
    _pinned: _PinnedPrefix | None = None

    @property
    def in_flight(self) -> list[RequestState]:
        """The prompts in flight, in order of admission."""
        return list(self._in_flight.values())

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests that :func:`check_fits` has passed."""
        self.queue = deque(admission_order([*self.queue, *requests]))

    @property
    def idle(self) -> bool:
        return not self.queue and not self._in_flight

    @property
    def waits(self) -> bool:
        """Whether something waits for pages."""
        return bool(self.queue or self._short)

    def admit(self) -> None:
        """Grant pages to waiting samples of prompts in flight, then to waiting prompts, until one does not fit."""
        if not self.waits:
            return
        budget = self._budget()
        while self._short:
            state = self._short[0]
            if not self._grant(state, pages_per_unit(state.request.params, self.tree.page_size), budget):
                return
            self._short.popleft()
        while self.queue and self._admit_prompt(self.queue[0], budget):
            self.queue.popleft()
        if self.queue and not self._in_flight:
            # Nothing runs, so only the pinned prefix can be in the way: its last page may be one page more than the
            # prompt alone.
            self._drop_pinned()
            admitted = self._admit_prompt(self.queue[0], budget)
            assert admitted, "a request that passed check_fits must fit an empty pool"
            self.queue.popleft()

    def retire(self, state: RequestState) -> None:
        """Take a request whose samples have all finished out of the tree, but for what the next prompt shares."""
        del self._in_flight[state.prompt.id]
        keep = common_prefix(state.request.tokens, self.queue[0].tokens) if self.queue else 0
        if keep > (self._pinned.sequence.length if self._pinned else 0):
            self._drop_pinned()
            whole = keep == len(state.request.tokens)
            if not whole:
                self.tree.trim(state.prompt, keep)
            self._pinned = _PinnedPrefix(state.prompt, state.first_logits if whole else None)
        else:
            self.tree.release(state.prompt)

    def close(self) -> None:
        """Release every prompt; what ran is the engine's to release."""
        self._drop_pinned()
        for state in self._in_flight.values():
            self.tree.release(state.prompt)
        self._in_flight.clear()
        self._short.clear()
        self.queue.clear()

    @property
    def reserved(self) -> int:
        """Pages of the free ones that are reserved: for running samples, and for granted ones that have not started."""
        return self.reserved_pages() + sum(
            (state.granted - state.started) * pages_per_unit(state.request.params, self.tree.page_size)
            for state in self._in_flight.values()
            if state.granted > state.started
        )

    def _budget(self) -> _Budget:
        """What may be granted now."""
        running = sum(state.granted - state.finished for state in self._in_flight.values())
        return _Budget(self.reserved, max(0, self.most_running - running))

    def _grant(self, state: RequestState, unit: int, budget: _Budget) -> bool:
        """Reserve ``unit`` pages for as many of a request's waiting samples as fit; True if none is left waiting."""
        waiting = state.wanted - state.granted
        fit = waiting if unit == 0 else min(waiting, max(0, self.tree.allocator.free - budget.reserved) // unit)
        fit = min(fit, budget.places)
        state.granted += fit
        budget.reserved += fit * unit
        budget.places -= fit
        return fit == waiting

    def _admit_prompt(self, request: Request, budget: _Budget) -> bool:
        """Insert a prompt and reserve pages for its first samples; where that does not fit, the tree is only read."""
        if not budget.places:
            return False
        found = self.tree.match(request.tokens)
        missing = pages_for(len(request.tokens) - found.length, self.tree.page_size)
        more, unit = self._parted(found), pages_per_unit(request.params, self.tree.page_size)
        if self.tree.allocator.free - missing < budget.reserved + more + unit:
            return False
        budget.reserved += more
        prompt = self.tree.insert(request.tokens, found)
        state = RequestState(request, prompt, first_logits=self._known_logits(prompt))
        self._in_flight[prompt.id] = state
        if not self._grant(state, unit, budget):
            self._short.append(state)
        self._drop_pinned()  # the new prompt begins with all of it
        return True

    def _parted(self, found: Match) -> int:
        """Pages more that running samples may take once a prompt is inserted where ``found`` ends.

        A sample's leaf stops growing in place where the prompt ends with it or goes on below it: its next token
        then starts a page of its own.  A split leaves that as it is.
        """
        node = found.node
        if found.offset < node.length or not node.grows_in_place:
            return 0
        (sequence,) = node.sequences.values()
        left = self.tokens_left(sequence)
        return pages_for(left, self.tree.page_size) - node.pages_to_add(left)

    def _known_logits(self, prompt: Sequence) -> Tensor | None:
        """The first logits of an equal prompt, if one has been computed and is still at hand."""
        # Equal prompts end at one node, and either all those in flight have their logits or none has: so any will do.
        for id in prompt.node.sequences:
            if id in self._in_flight:
                return self._in_flight[id].first_logits
        pinned = self._pinned
        return pinned.first_logits if pinned is not None and pinned.sequence.node is prompt.node else None

    def _drop_pinned(self) -> None:
        if self._pinned is not None:
            self.tree.release(self._pinned.sequence)
            self._pinned = None
