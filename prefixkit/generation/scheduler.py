"""Who may start: prompts wait until their KV, and that of all their samples, is sure to fit.

Nothing here runs a model.  A sample is admitted only when the pages it may still need are free and promised to nobody
else, so a running sample never meets a full pool: prompts beyond the budget wait, and nothing fails.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.generation.request import BeamParams, Request, SamplingParams
from prefixkit.tree.pages import OutOfPages, pages_for
from prefixkit.tree.radix import PrefixTree, Sequence
from prefixkit.tree.tokens import common_prefix

log = logging.getLogger("prefixkit")


class KVBudgetTooSmall(ValueError):
    """The pool cannot hold even one sequence of some prompt."""


@dataclass(eq=False)
class Group:
    """A prompt in flight, and how many of its samples have been promised pages, started and finished.

    ``first_logits`` are the logits after the prompt's last token: ``[vocab]``, kept while the group is in flight.
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
class _Anchor:
    """A finished prompt's prefix that a waiting prompt shares, kept so that no token is computed twice."""

    sequence: Sequence
    first_logits: Tensor | None


def pages_per_unit(params: SamplingParams | BeamParams, page_size: int) -> int:
    """Pages that one sample, or one beam search, can come to need beyond its prompt.

    The last token drawn needs no KV.  Beams fork at any token, and each fork starts a fresh page.
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
                "raise kv_budget, or lower max_new_tokens"
            )


def admission_order(requests: Iterable[Request]) -> list[Request]:
    """Requests in lexicographic order of their tokens."""
    # Big-endian bytes compare like the tokens themselves.
    return sorted(requests, key=lambda request: (request.tokens.astype(">u4").tobytes(), request.prompt_index))


@dataclass(eq=False)
class Scheduler:
    """The queue of prompts, the groups in flight, and the prefix kept for those that wait.

    Prompts are admitted in lexicographic order of their tokens: those that share a prefix follow each other, and a prompt
    that is another's prefix comes first.  Results are independent of this order.

    Attributes:
        tree: Where prompts are inserted.
        promised: Returns the pages that running samples may still take.
        most_running: Samples, or beam searches, that run at once at most.
    """

    tree: PrefixTree
    promised: Callable[[], int]
    most_running: int = sys.maxsize
    queue: deque[Request] = field(default_factory=deque)
    groups: list[Group] = field(default_factory=list)
    _anchor: _Anchor | None = None

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests that :func:`check_fits` has passed."""
        self.queue = deque(admission_order([*self.queue, *requests]))

    @property
    def idle(self) -> bool:
        return not self.queue and not self.groups

    @property
    def waits(self) -> bool:
        """Whether something waits for pages."""
        return bool(self.queue) or any(group.granted < group.wanted for group in self.groups)

    def admit(self) -> None:
        """Grant pages to waiting samples of prompts in flight, then to waiting prompts, until something does not fit."""
        for group in self.groups:
            if not self._grant(group):
                return
        while self.queue and self._admit_prompt(self.queue[0]):
            self.queue.popleft()
        if self.queue and not self.groups:
            # Nothing runs, so only the anchor can be in the way: its last page may be one page more than the prompt alone.
            self._drop_anchor()
            admitted = self._admit_prompt(self.queue[0])
            assert admitted, "a request that passed check_fits must fit an empty pool"
            self.queue.popleft()

    def retire(self, group: Group) -> None:
        """Take a group whose samples have all finished out of the tree, but for what the next prompt in line shares."""
        self.groups.remove(group)
        keep = common_prefix(group.request.tokens, self.queue[0].tokens) if self.queue else 0
        if keep > (self._anchor.sequence.length if self._anchor else 0):
            self._drop_anchor()
            whole = keep == len(group.request.tokens)
            if not whole:
                self.tree.trim(group.prompt, keep)
            self._anchor = _Anchor(group.prompt, group.first_logits if whole else None)
        else:
            self.tree.release(group.prompt)

    def close(self) -> None:
        """Release every prompt; what ran is the engine's to release."""
        self._drop_anchor()
        for group in self.groups:
            self.tree.release(group.prompt)
        self.groups.clear()
        self.queue.clear()

    def _free(self) -> int:
        """Pages that are neither taken nor promised."""
        unit = sum(
            (group.granted - group.started) * pages_per_unit(group.request.params, self.tree.page_size)
            for group in self.groups
        )
        return self.tree.allocator.free - self.promised() - unit

    def _places(self) -> int:
        """How many more may run."""
        return max(0, self.most_running - sum(group.granted - group.finished for group in self.groups))

    def _grant(self, group: Group) -> bool:
        """Promise pages to as many of a group's waiting samples as fit; True if none is left waiting."""
        unit = pages_per_unit(group.request.params, self.tree.page_size)
        waiting = group.wanted - group.granted
        if waiting:
            fit = waiting if unit == 0 else min(waiting, max(0, self._free() // unit))
            fit = min(fit, self._places())
            group.granted += fit
            waiting -= fit
        return waiting == 0

    def _admit_prompt(self, request: Request) -> bool:
        """Insert a prompt and promise pages to its first samples; leaves no trace if that does not fit."""
        if not self._places():
            return False
        try:
            prompt = self.tree.insert(request.tokens)
        except OutOfPages:
            return False
        group = Group(request, prompt)
        # Inserting can split a growing node, which can change what its sample may still need: so check afterwards.
        if self._free() < pages_per_unit(request.params, self.tree.page_size):
            self.tree.release(prompt)
            return False
        group.first_logits = self._known_logits(request.tokens)
        self.groups.append(group)
        self._grant(group)
        self._drop_anchor()  # the new prompt begins with all of it
        return group.granted > 0

    def _known_logits(self, tokens: NDArray[np.int32]) -> Tensor | None:
        """The first logits of an equal prompt, if one has been computed and is still at hand."""
        for group in self.groups:
            if group.first_logits is not None and np.array_equal(group.request.tokens, tokens):
                return group.first_logits
        if self._anchor is not None and np.array_equal(self._anchor.sequence.tokens(), tokens):
            return self._anchor.first_logits
        return None

    def _drop_anchor(self) -> None:
        if self._anchor is not None:
            self.tree.release(self._anchor.sequence)
            self._anchor = None
