"""What a session holds between calls: pool, tree and runner, one lock, and the prefixes that it keeps."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.engine import Engine
from prefixkit.engine.memory import MOST_RUNNING, session_pages
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.prefixes.transfer import load_prefixes, save_prefixes
from prefixkit.engine.prefixes.write import check_place
from prefixkit.engine.request import Request, Sample
from prefixkit.engine.runs.detokenizer import detokenizer_of
from prefixkit.engine.sharing_report import Report
from prefixkit.models import ModelFacts, patched_facts
from prefixkit.models.model_fingerprint import kv_fingerprint
from prefixkit.models.weights.content import kv_version
from prefixkit.sampling.params import SamplingParams
from prefixkit.session.assembly import engine_of
from prefixkit.session.prompts import Prompt
from prefixkit.session.requests import prompt_requests
from prefixkit.session.search import SearchNode, with_tokens
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.radix import Sequence as TreeSequence

log = logging.getLogger("prefixkit")


class SessionBusy(ValueError):
    """A session was called while a call of it was under way: from another thread, a callback, or beside a stream."""


class MemoryReleased(ValueError):
    """A session was called between :meth:`Session.release_memory` and :meth:`Session.resume`, or after its end."""


@dataclass(frozen=True)
class Pin:
    """A prompt whose KV stays in a session's pool.

    Attributes:
        tokens: The prompt's token ids.
        sequence: These in the session's tree.
        session: Whose pool it is.
    """

    tokens: list[int]
    sequence: TreeSequence
    session: SessionMemory

    def release(self) -> None:
        """Let its pages be evicted once they are needed.

        Raises:
            SessionBusy: a call of the session is under way.
            ValueError: it was released before.
        """
        with self.session._busy():
            tree = self.sequence.tree
            if not isinstance(tree, PrefixTree):
                raise ValueError(f"the pin of {len(self.tokens)} tokens was released before; pin the prompt again")
            engine = self.session._engine
            if engine is not None and tree is engine.tree:
                tree.retain(self.sequence)
            else:
                self.sequence.tree = None  # it ended with its tree


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


class Stream(Iterator[Sample]):
    """The samples of a call as they finish; :meth:`prefixkit.Session.stream` says how it begins and ends."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin, self._cut = begin, ""
        self._samples: Any = None  # a generator, once it has begun

    def __next__(self) -> Sample:
        if self._cut:
            raise ValueError(f"the stream was cut short by {self._cut}; call session.stream() again for its samples")
        if self._samples is None:
            next(begun := self._begin())
            self._samples = begun
        try:
            return next(self._samples)  # type: ignore[no-any-return]
        except BaseException as error:
            if not isinstance(error, StopIteration) and self._samples.gi_frame is None:  # else its own callback asked
                self._cut = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """End it: samples that have not finished are dropped, and none follow."""
        self._samples = self._samples or (one for one in list[Sample]())
        self._samples.close()

    def cut(self, why: str) -> None:
        """End it where it is under way, between two samples; a further ``next`` raises with the reason."""
        if self._samples is not None and self._samples.gi_suspended:
            self._samples.close()
            self._cut = why


class SessionMemory:
    """The part of a :class:`prefixkit.Session` that outlives its calls; see there for the arguments."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        kv_budget: float | str | None = None,
        page_size: int = 16,
        prefill_chunk: int | None = None,
        compiled: bool = False,
        most_running: int = MOST_RUNNING,
        memory: MemoryPolicy | None = None,
    ) -> None:
        patched_facts(model)  # or raise
        if not isinstance(memory, MemoryPolicy | None):
            raise TypeError(f"memory must be a MemoryPolicy, got {type(memory).__name__} {memory!r}")
        self.model, self.tokenizer = model, tokenizer
        self._kv_budget, self._page_size = kv_budget, page_size
        self._prefill_chunk, self._compiled, self._most_running = prefill_chunk, compiled, most_running
        self._memory = memory
        self._version: int | None = None  # of the weights that the prefix cache's KV is of
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._engine: Engine | None = None
        self.resume()

    # -- memory --------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take memory for pool and graphs again after :meth:`release_memory`; nothing where it was not released."""
        with self._busy():
            if self._engine is None:
                self._engine = self._make_engine(patched_facts(self.model))

    def release_memory(self) -> None:
        """Give back the pool and the graphs, for a backward pass, say; :meth:`resume` takes them again."""
        with self._busy():
            self._engine = None

    def close(self) -> None:
        """End the session and the streams under way: what the end of a ``with`` block does.

        Raises:
            SessionBusy: a call of this session is under way, as in a callback; only streams between samples can end.
        """
        for stream in list(self._streams):
            stream.cut("the end of its session")
        self.release_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def report(self) -> Report:
        """The report of the call that is under way, or of the last one; empty before the first."""
        return Report() if self._engine is None else self._engine.report

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Say that weights have changed: the prefix cache is emptied, and the next call captures its graphs again.

        Calls notice changed weights by themselves, but for a few elements written through ``.data`` or a raw pointer,
        which ``patch(model, compare_weights="always")`` notices too.  CUDA graphs read such weights where they are;
        only a number that a layer read from its weights on the host is part of a graph.
        """
        with self._busy():
            if self._engine is not None:
                self._engine.forget()
                self._engine.runner.drop_graphs()

    def pin(self, prompt: Prompt) -> Pin:
        """Compute a prompt's KV, and keep it in the pool until the pin is released.

        It ends too when the session gives its memory back, and with a call that Ctrl-C interrupts.

        Args:
            prompt: A string, token ids, or a list of chat messages; see :func:`prefixkit.generate`.

        Raises:
            SessionBusy, MemoryReleased, ValueError, TypeError: as :meth:`generate`.
            KVBudgetTooSmall: the pool does not hold it beside what is pinned already.
        """
        with self._busy():
            facts = patched_facts(self.model)
            requests = prompt_requests(facts, self.tokenizer, [prompt])
            self._run(facts, requests, False, lambda sample: None)
            return Pin(requests[0].tokens.tolist(), self._ready(facts).pin(requests[0].tokens), self)

    def save(self, path: str | Path, prefixes: Prompt | SearchNode | Iterable[Prompt | SearchNode]) -> int:
        """Write the KV of prompts to a file, for :meth:`load` of another session or process.

        What the session has no KV of is computed first.  The file is written beside its place and renamed: an
        interrupted write leaves an earlier file as it was.

        Args:
            path: The file; its name should end in ``.safetensors``.
            prefixes: One or a list of them: strings, lists of token ids, lists of chat messages, or search nodes of
                this session.

        Returns:
            How many tokens it holds, each shared one counted once.

        Raises:
            SessionBusy, MemoryReleased, ValueError, TypeError: as :meth:`generate`; nothing was written.
            KVBudgetTooSmall: the pool does not hold all of them at once; nothing was written.
            OSError: the file cannot be written; where it is a folder, or in one that does not exist, nothing was
                computed.
        """
        with self._busy():
            check_place(path)
            own, _ = with_tokens(self, "prefixes", prefixes)
            if isinstance(own, list) and not own:
                raise ValueError("prefixes is empty; pass at least one prompt or search node")
            facts = patched_facts(self.model)
            requests = prompt_requests(facts, self.tokenizer, own)
            pins = list[TreeSequence]()
            try:
                for request in requests:
                    self._run(facts, [request], False, lambda sample: None)
                    pins.append(self._ready(facts).pin(request.tokens))
                return save_prefixes(self._ready(facts), path, pins, kv_fingerprint(self.model))
            finally:
                engine = self._ready(facts)
                for pin in pins:
                    if pin.tree is engine.tree:  # after an interrupt the engine has another
                        engine.cache.retain(pin)

    def load(self, path: str | Path) -> int:
        """Read prefixes that :meth:`save` wrote into the prefix cache, as if their prompts had been computed here.

        Args:
            path: The file.  It is mapped into memory; what the cache has already is not read.

        Returns:
            How many tokens were read.

        Raises:
            SessionBusy, MemoryReleased: as :meth:`generate`.
            PrefixFileError: it is no prefix file, it is torn, or its model, dtype or layout is another; the message
                says which.
            KVBudgetTooSmall: the pool does not hold it.
            OSError: it cannot be read.
        """
        with self._busy():
            facts = patched_facts(self.model)
            return load_prefixes(self._ready(facts), path, kv_fingerprint(self.model), facts.vocab_size)

    # -- a call --------------------------------------------------------------------------------------------------------

    def _run(self, facts: ModelFacts, requests: list[Request], *listeners: Any) -> Result:
        engine = self._ready(facts, [request.tokens for request in requests])
        engine.listen(*listeners)
        return run(engine, facts, self.tokenizer, requests)

    def _make_engine(self, facts: ModelFacts) -> Engine:
        self._shape, spec = facts.attention_shape, facts.spec
        pages = session_pages(spec, self._kv_budget, self._page_size)
        tokens = pages * self._page_size
        log.info(
            "session: KV for %d tokens (%.2f GiB) on %s", tokens, tokens * spec.bytes_per_token / 2**30, spec.device
        )
        return engine_of(
            facts,
            pages,
            page_size=self._page_size,
            prefill_chunk=self._prefill_chunk,
            compiled=self._compiled,
            most_running=self._most_running,
            keep_samples=True,
            policy=self._memory,
        )

    def _ready(self, facts: ModelFacts, prompts: Sequence[NDArray[np.int32]] = ()) -> Engine:
        """The engine, without KV of other weights than the model has now; these prompts are about to use its KV."""
        if self._engine is None:
            raise MemoryReleased("the session has given its memory back; call resume() first, or open another session")
        version = kv_version(self.model, partial(self._engine.tree.longest_match, prompts), facts.state)
        if version != self._version:
            if self._version is not None:
                log.info("session: the model's weights, adapters or numbers changed: the prefix cache is emptied")
            if facts.attention_shape != self._shape:
                log.info("session: the model's attention layers have changed: its pool and graphs are made anew")
                self._engine = None  # first, for the memory
                self._engine = self._make_engine(facts)
            self._engine.forget()
            self._version = version  # last: an interrupt before leaves it to the next call
        return self._engine

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionBusy(
                "a call of this session is under way; wait for its end, close its stream, or open a second session"
            )
        try:
            yield
        except KeyboardInterrupt:
            if self._engine is not None:
                self._engine.restart()
            raise
        finally:
            self._lock.release()


def run(engine: Engine, facts: ModelFacts, tokenizer: Any, requests: list[Request]) -> Result:
    """One call: the engine runs requests to their end."""
    prepare(engine, facts, tokenizer, requests)
    return Result(tuple(engine.run(requests)), engine.report)


def prepare(engine: Engine, facts: ModelFacts, tokenizer: Any, requests: list[Request]) -> None:
    """A new report, and how tokens become text."""
    check_length(facts, max(len(request.tokens) + request.params.max_new_tokens for request in requests))
    engine.report = Report()
    special = any(isinstance(one.params, SamplingParams) and one.params.stop_strings for one in requests)
    engine.runs.detokenizer = detokenizer_of(tokenizer, special)


def check_length(facts: ModelFacts, longest: int) -> None:
    """Refuse sequences that are longer than a chunk of chunked attention; warn where the model was made for fewer."""
    if (most := facts.longest_text) is not None and longest > most:
        raise ValueError(f"sequences may reach {longest} tokens, and chunks of attention have {most}; ask for fewer")
    limit = getattr(facts.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        log.warning("sequences may reach %d tokens, but the model was made for %d positions", longest, limit)
