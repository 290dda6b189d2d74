"""A session: KV pool, tree, CUDA graphs and compiled layers of a patched model, kept from call to call."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Unpack

from prefixkit.assembly import engine_of
from prefixkit.engine.engine import Engine
from prefixkit.engine.memory import session_pages
from prefixkit.engine.report import Report
from prefixkit.engine.request import BeamFields, BeamParams, Request, Sample, TokenEvent
from prefixkit.engine.scheduler import check_fits
from prefixkit.engine.stop import special_tokens
from prefixkit.models import kv_spec, text_config
from prefixkit.requests import Prompts, beam_requests, check_patched, checked_requests, sampling_requests
from prefixkit.sampling.params import SamplingFields, SamplingParams

log = logging.getLogger("prefixkit")


class SessionBusy(ValueError):
    """A session was called while a call of it was under way: from another thread, a callback, or beside a stream."""


class MemoryReleased(ValueError):
    """A session was called between :meth:`Session.release_memory` and :meth:`Session.resume`, or after its end."""


@dataclass(frozen=True)
class Result:
    """The samples of a call, if it keeps them, by prompt and then index, and the report of what they shared."""

    samples: tuple[Sample, ...]
    report: Report

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def of_prompt(self, prompt_index: int) -> list[Sample]:
        """The samples of one prompt."""
        return [sample for sample in self.samples if sample.prompt_index == prompt_index]


class Session:
    """What sampling from one model needs again and again, made once: the second call costs its steps.

    A call at a time: a session that is busy raises :class:`SessionBusy`.  Two sessions may run in two threads, on one
    model or on two.  A call that raises leaves the session usable.  Weights that change in place between calls are used
    as they are then: no KV outlives a call (see :meth:`weights_changed`).  Where steps cannot run in CUDA graphs, for
    lack of memory too, a call decodes step by step, with one log line.

    Args:
        model: A model that :func:`prefixkit.patch` has patched.
        tokenizer: Its tokenizer; None where all prompts are token ids: samples have no text then, and stop strings are
            refused.
        kv_budget: KV that the pool holds, in bytes or as a size such as ``"40GiB"``; None: half of the memory that is
            free.  The pool is made at once and does not grow; prompts beyond it wait for others to finish.
        page_size: Tokens per KV page, 1 to 128.
        prefill_chunk: Prompt tokens computed per step at most; None: 1,024 on the CPU, 8,192 on a GPU.
        compiled: On a GPU, decode through torch.compile, after some seconds of compiling: once for each model, whose
            later sessions use the same, and less where torch finds it in its cache on disk.

    Raises:
        NotPatched: the model is not patched.
        ValueError: a parameter is out of range, or the budget holds no page.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        kv_budget: float | str | None = None,
        page_size: int = 16,
        prefill_chunk: int | None = None,
        compiled: bool = False,
    ) -> None:
        check_patched(model)
        self.model, self.tokenizer = model, tokenizer
        self._kv_budget, self._page_size = kv_budget, page_size
        self._prefill_chunk, self._compiled = prefill_chunk, compiled
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[Generator[Sample, None, None]] = weakref.WeakSet()
        self._engine: Engine | None = None
        self.resume()

    # -- memory --------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take memory for pool and graphs again after :meth:`release_memory`; nothing where it was not released."""
        with self._busy():
            if self._engine is None:
                spec = kv_spec(self.model)
                pages = session_pages(spec, self._kv_budget, self._page_size)
                self._engine = engine_of(
                    self.model,
                    pages,
                    page_size=self._page_size,
                    prefill_chunk=self._prefill_chunk,
                    compiled=self._compiled,
                )
                tokens = pages * self._page_size
                size = tokens * spec.bytes_per_token / 2**30
                log.info("session: KV for %d tokens (%.2f GiB) on %s", tokens, size, spec.device)

    def release_memory(self) -> None:
        """Give back the pool and the graphs, for a backward pass, say; :meth:`resume` takes them again."""
        with self._busy():
            self._engine = None

    def close(self) -> None:
        """End the session and its streams: what the end of a ``with`` block does.

        Raises:
            SessionBusy: a call of this session is under way, as in a callback; only streams between samples can end.
        """
        for stream in list(self._streams):
            if not stream.gi_running:  # type: ignore[attr-defined]
                stream.close()
        self.release_memory()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        keep: bool = True,
        on_sample: Callable[[Sample], None] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_step: Callable[[int], None] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Result:
        """Sample continuations of each prompt; see :func:`prefixkit.generate`.

        Raises:
            SessionBusy: a call of this session is under way.
            MemoryReleased: the session has ended or has given its memory back.
            KVBudgetTooSmall: one of the sequences does not fit the pool.
            ValueError, TypeError: as :func:`prefixkit.generate`.
        """
        with self._busy():
            requests = sampling_requests(self.model, self.tokenizer, prompts, params, fields)
            return self._run(requests, keep, on_sample, on_token, on_step)

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[Sample, None, None]:
        """As :meth:`generate`, but gives each sample as it finishes and keeps none.

        Everything is checked before this returns.  The session is busy from the first sample that is asked for until
        the iterator ends or is closed, as it is when the last reference to it goes; samples that have not finished then
        are dropped.
        """
        with self._busy():
            requests = sampling_requests(self.model, self.tokenizer, prompts, params, fields)
            engine = self._ready()
            check_fits(requests, engine.tree, engine.pool.spec.bytes_per_token)

        def samples() -> Generator[Sample, None, None]:
            with self._busy():
                engine = self._ready()
                engine.listen(on_token=on_token)
                prepare(engine, self.model, self.tokenizer, requests)
                yield from engine.stream(requests)

        stream = samples()
        self._streams.add(stream)
        return stream

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamParams | Sequence[BeamParams] | None = None,
        *,
        on_sample: Callable[[Sample], None] | None = None,
        **fields: Unpack[BeamFields],
    ) -> Result:
        """Search for the likeliest continuations of each prompt; see :func:`prefixkit.beam_search`.

        Raises:
            SessionBusy, MemoryReleased, KVBudgetTooSmall, ValueError, TypeError: as :meth:`generate`.
        """
        with self._busy():
            requests = beam_requests(self.model, self.tokenizer, prompts, params, fields)
            return self._run(requests, True, on_sample)

    def run(
        self,
        requests: Iterable[Request],
        *,
        keep: bool = True,
        on_sample: Callable[[Sample], None] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> Result:
        """Run requests, samples and beam searches in one batch over one tree: what the other calls are made of.

        Args:
            requests: Token ids, each with how to sample from them or search.  Their occurrences are taken as they are:
                equal prompts with equal seeds need different ones, or their samples are equal.
            keep, on_sample, on_token, on_step: See :func:`prefixkit.generate`.

        Raises:
            SessionBusy, MemoryReleased, KVBudgetTooSmall, ValueError, TypeError: as :meth:`generate`.
        """
        with self._busy():
            checked = checked_requests(self.model, self.tokenizer, requests)
            return self._run(checked, keep, on_sample, on_token, on_step)

    def weights_changed(self) -> None:
        """Say that weights were written to in a way that torch does not count, through ``.data`` or a raw pointer.

        The next call captures its graphs again: a number that a layer read from its weights on the host is part of
        them.  KV of the old weights is gone in any case, for none outlives its call.
        """
        with self._busy():
            if self._engine is not None:
                self._engine.runner.forget()

    def _run(self, requests: list[Request], *listeners: Any) -> Result:
        engine = self._ready()
        engine.listen(*listeners)
        return run(engine, self.model, self.tokenizer, requests)

    def _ready(self) -> Engine:
        if self._engine is None:
            raise MemoryReleased("the session has given its memory back; call resume() first, or open another session")
        return self._engine

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionBusy(
                "a call of this session is under way; wait for its end, close its stream, or open a second session"
            )
        try:
            yield
        finally:
            self._lock.release()


def run(engine: Engine, model: Any, tokenizer: Any, requests: list[Request]) -> Result:
    """One call: the engine runs requests to their end."""
    prepare(engine, model, tokenizer, requests)
    return Result(tuple(engine.run(requests)), engine.report)


def prepare(engine: Engine, model: Any, tokenizer: Any, requests: list[Request]) -> None:
    """A new report, and how tokens become text."""
    _warn_of_length(model, requests)
    engine.report, engine.decode, engine.special_tokens = Report(), None, {}
    if tokenizer is not None:
        engine.decode = lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
        if any(isinstance(request.params, SamplingParams) and request.params.stop_strings for request in requests):
            engine.special_tokens = special_tokens(tokenizer, engine.decode)


def _warn_of_length(model: Any, requests: Sequence[Request]) -> None:
    limit = getattr(text_config(model), "max_position_embeddings", None)
    longest = max(len(request.tokens) + request.params.max_new_tokens for request in requests)
    if limit is not None and longest > limit:
        log.warning("sequences may reach %d tokens, but the model was made for %d positions", longest, limit)
