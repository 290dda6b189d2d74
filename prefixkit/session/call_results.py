"""The listeners, results and stream of one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkit.engine.call import Call
from prefixkit.engine.request import Request, Sample
from prefixkit.engine.runs.detokenizer import detokenizer_of
from prefixkit.engine.sharing_report import Report
from prefixkit.models import ModelFacts

log = logging.getLogger("prefixkit")


class SessionBusy(ValueError):
    """A session was called during another of its calls: by a thread, by a callback, or while a stream was open."""


class MemoryReleased(ValueError):
    """A session was called after :meth:`Session.release_memory` or :meth:`Session.close`, before
    :meth:`Session.resume`.
    """


@dataclass(frozen=True)
class Result:
    """The result of a call: a sequence of its samples, with a report.

    Attributes:
        samples: The samples, ordered by prompt and then index; empty with ``return_samples=False``.
        report: What the samples shared, and what that saved.
    """

    samples: tuple[Sample, ...]
    report: Report

    def __repr__(self) -> str:
        return f"Result({self.report.headline})"

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def of_prompt(self, prompt_index: int) -> list[Sample]:
        """The samples of the prompt at index ``prompt_index`` of the call's list, from 0."""
        return [sample for sample in self.samples if sample.prompt_index == prompt_index]


def call_of(facts: ModelFacts, tokenizer: Any, requests: Sequence[Request], *listeners: Any) -> Call:
    """A call with these listeners, in the order of the fields of :class:`Call`, and with a detokenizer.

    Raises:
        ValueError: see :class:`Call`.
    """
    longest = max(len(request.tokens) + request.params.max_new_tokens for request in requests)
    check_length(facts, longest, longest - 1)
    return Call(detokenizer_of(tokenizer), *listeners)


def check_length(facts: ModelFacts, longest: int, computed: int) -> None:
    """Warn of sequences of which more tokens are computed than the model was made for.

    Args:
        facts: Of the model.
        longest: Tokens of the longest sequence.
        computed: Those of them whose KV is computed: all, or all but a last one that is sampled or scored.

    Raises:
        ValueError: the model has learned fewer positions than there are tokens to compute.
    """
    learned = facts.probed.positions
    if learned is not None and computed > learned:
        raise ValueError(
            f"sequences may reach {longest} tokens, but the model has learned {learned} positions and has none beyond; "
            "pass shorter prompts or fewer max_new_tokens"
        )
    limit = getattr(facts.config, "max_position_embeddings", None)
    if limit is not None and computed > limit:
        log.warning("sequences may reach %d tokens, but the model was made for %d positions", longest, limit)


class Stream(Iterator[Sample]):
    """The samples of a call as they finish; :meth:`prefixkit.Session.stream` says when the call starts and ends."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin, self._cut = begin, ""
        self._samples: Any = None  # a generator, once the call has started

    def __repr__(self) -> str:
        if self._cut:
            return f"Stream(cut short by {self._cut})"
        ended = self._samples is not None and getattr(self._samples, "gi_frame", None) is None
        return f"Stream({'not begun' if self._samples is None else 'ended' if ended else 'under way'})"

    def __next__(self) -> Sample:
        if self._cut:
            raise ValueError(f"the stream was cut short by {self._cut}; call session.stream() again for its samples")
        if self._samples is None:
            next(begun := self._begin())
            self._samples = begun
        try:
            return next(self._samples)  # type: ignore[no-any-return]
        except BaseException as error:
            if not isinstance(error, StopIteration) and self._samples.gi_frame is None:  # not from its own callback
                self._cut = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """End the stream: unfinished samples are dropped, and no more samples follow."""
        self._samples = self._samples or (one for one in list[Sample]())
        self._samples.close()

    def cut(self, why: str) -> None:
        """End a stream that has started, between two samples; a further ``next`` raises with the reason."""
        if self._samples is not None and self._samples.gi_suspended:
            self._samples.close()
            self._cut = why
