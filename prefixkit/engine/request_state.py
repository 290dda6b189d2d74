"""A request on its way through the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
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
        first_logits: ``[vocab]`` the logits after the prompt's last token, while it is in flight.
    """

    request: Request
    order: int
    waiting_since: int = 0
    prompt: Sequence | None = None
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
