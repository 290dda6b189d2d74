"""What a session holds between calls: pool, tree and runner, one lock, and the prefixes that it keeps."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.call import Call
from prefixkit.engine.engine import Engine, checked_limits
from prefixkit.engine.memory import MOST_RUNNING
from prefixkit.engine.policy import MemoryPolicy
from prefixkit.engine.request import Request
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.limits import session_pages
from prefixkit.kv.prefixes.transfer import load_prefixes, save_prefixes
from prefixkit.kv.prefixes.write import check_place
from prefixkit.kv.store import KVStore
from prefixkit.kv.stores import ModelStores, StoreKind
from prefixkit.models import ModelFacts, patched_facts
from prefixkit.models.model_fingerprint import kv_fingerprint
from prefixkit.models.model_stores import kind_of, stores_of
from prefixkit.models.weights.content import kv_version
from prefixkit.session.assembly import engine_of
from prefixkit.session.call_results import MemoryReleased, Result, SessionBusy, call_of
from prefixkit.session.prompts import Prompt
from prefixkit.session.requests import prompt_requests
from prefixkit.session.search import SearchNode, with_tokens
from prefixkit.session.stream import Stream
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.radix import Sequence as TreeSequence

log = logging.getLogger("prefixkit")


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
            SessionBusy: a call of the session, or another one that uses its KV store, is under way.
            ValueError: it was released before.
        """
        with self.session._busy():
            tree = self.sequence.tree
            if not isinstance(tree, PrefixTree):
                raise ValueError(f"the pin of {len(self.tokens)} tokens was released before; pin the prompt again")
            store = self.session.store
            if store is None or tree is not store.tree:
                self.sequence.tree = None  # it ended with its tree
                return
            with self.session._lent_store():
                tree.retain(self.sequence)


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
        checked_limits(1 if prefill_chunk is None else prefill_chunk, most_running)
        self.model, self.tokenizer = model, tokenizer
        self._kv_budget, self._page_size = kv_budget, page_size
        self._prefill_chunk, self._compiled, self._most_running = prefill_chunk, compiled, most_running
        self._memory = MemoryPolicy() if memory is None else memory
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._home: KVStore | None = None
        self._kind: StoreKind
        self._stores: ModelStores
        self._report = Report()
        self.resume()

    # -- memory --------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take memory for pool and graphs again after :meth:`release_memory`; nothing where it was not released."""
        with self._busy():
            if self._home is None:
                self._take_home(patched_facts(self.model))

    def release_memory(self) -> None:
        """Give back the pool and the graphs, for a backward pass, say; :meth:`resume` takes them again.

        They are freed once no other session and no call uses them.
        """
        with self._busy():
            self._let_go()

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
        return self._report

    @property
    def store(self) -> KVStore | None:
        """Where the session's KV lies: pool, tree and prefix cache, to look at between calls; None once released.

        Sessions without a ``kv_budget`` and ``model.generate()`` share one, as far as they compute alike.
        """
        return self._home

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Say that weights have changed: the prefix cache is emptied, and the next call captures its graphs again.

        Calls notice changed weights by themselves, but for a few elements written through ``.data`` or a raw pointer,
        which ``patch(model, compare_weights="always")`` notices too.  CUDA graphs read such weights where they are;
        only a number that a layer read from its weights on the host is part of a graph.
        """
        with self._busy():
            if self._home is not None:
                with self._lent_store() as store:
                    store.version = None
                    for runner in store.runners.values():
                        runner.drop_graphs()

    def pin(self, prompt: Prompt) -> Pin:
        """Compute a prompt's KV, and keep it in the pool until the pin is released.

        It ends too when the session gives its memory back, and with a call that Ctrl-C interrupts.

        Args:
            prompt: A string, token ids, or a list of chat messages; see :func:`prefixkit.generate`.

        Raises:
            SessionBusy, MemoryReleased, ValueError, TypeError: as :meth:`generate`.
            KVBudgetTooSmall: the pool does not hold it beside what is pinned already.
        """
        with self._called() as facts:
            (request,) = prompt_requests(facts, self.tokenizer, [prompt])
            with self._engine(facts, [request.tokens], elsewhere=False) as engine:
                return Pin(request.tokens.tolist(), self._compute(facts, engine, request), self)

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
        with self._called() as facts:
            check_place(path)
            own, _ = with_tokens(self, "prefixes", prefixes)
            if isinstance(own, list) and not own:
                raise ValueError("prefixes is empty; pass at least one prompt or search node")
            requests, pins = prompt_requests(facts, self.tokenizer, own), list[TreeSequence]()
            with self._engine(facts, [request.tokens for request in requests], elsewhere=False) as engine:
                store = engine.store
                try:
                    for request in requests:
                        pins.append(self._compute(facts, engine, request))
                    return save_prefixes(store, path, pins, kv_fingerprint(self.model))
                finally:
                    for pin in pins:
                        if pin.tree is store.tree:  # after an interrupt the store has another
                            store.retain(pin)

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
        with self._called() as facts, self._engine(facts, elsewhere=False) as engine:
            return load_prefixes(engine.store, path, kv_fingerprint(self.model), facts.vocab_size)

    # -- a call --------------------------------------------------------------------------------------------------------

    def _run(self, facts: ModelFacts, requests: list[Request], *listeners: Any) -> Result:
        with self._engine(facts, [request.tokens for request in requests]) as engine:
            call = self._call(facts, requests, *listeners)
            return Result(tuple(engine.run(requests, call)), call.report)

    def _compute(self, facts: ModelFacts, engine: Engine, request: Request) -> TreeSequence:
        """Compute a prompt's KV, and pin it."""
        engine.run([request], self._call(facts, [request], False, lambda sample: None))
        return engine.store.pin(request.tokens)

    def _call(self, facts: ModelFacts, requests: Sequence[Request], *listeners: Any) -> Call:
        call = call_of(facts, self.tokenizer, requests, *listeners)
        self._report = call.report
        return call

    @contextmanager
    def _called(self) -> Iterator[ModelFacts]:
        """What is known of the model, during a call of the session."""
        with self._busy():
            yield patched_facts(self.model)

    @contextmanager
    def _engine(
        self, facts: ModelFacts, prompts: Sequence[NDArray[np.int32]] = (), *, elsewhere: bool = True
    ) -> Iterator[Engine]:
        """An engine over a KV store that is lent to a call, without KV of other weights than the model has now.

        Args:
            facts: Of the model.
            prompts: What is about to use its KV.
            elsewhere: See :meth:`_lent_store`.
        """
        if self._home is None:
            raise MemoryReleased("the session has given its memory back; call resume() first, or open another session")
        if self._kind_of(facts) != self._kind or self._stores is not stores_of(facts.inner):
            log.info("session: the model's attention layers, or its patch, have changed: pool and graphs are made anew")
            self._let_go()  # first, for the memory
            self._take_home(facts)
        with self._lent_store(elsewhere) as store:
            known, found = store.version is not None, partial(store.tree.longest_match, prompts)
            if store.use_version((self._stores.epoch, kv_version(facts.inner, found, facts.state))) and known:
                log.info("session: the model's weights, adapters or numbers changed: the prefix cache is emptied")
            yield engine_of(
                facts,
                store,
                prefill_chunk=self._prefill_chunk,
                compiled=self._compiled,
                most_running=self._most_running,
                retain_samples=True,
                policy=self._memory,
            )

    @contextmanager
    def _lent_store(self, elsewhere: bool = False) -> Iterator[KVStore]:
        """The session's store while no other call uses it.

        Where one of ``generate()`` or of another session does, it is another store, if the call may run ``elsewhere``;
        else SessionBusy is raised.
        """
        store = self._home
        assert store is not None, "checked before"
        if self._kv_budget is None and not self._stores.lend(store, self):
            if not elsewhere:
                raise SessionBusy(
                    "another call uses the KV store that the model's sessions share with its generate(); wait for its "
                    "end, or give the session a kv_budget, for a store of its own"
                )
            store = self._stores.borrow(self._kind, self, self._size(self._stores.free(self._kind.spec.device)))
        try:
            yield store
        except KeyboardInterrupt:
            store.restart()
            raise
        finally:
            self._stores.return_(store)

    def _kind_of(self, facts: ModelFacts) -> StoreKind:
        return kind_of(facts, self._page_size, self._memory.eviction, self._compiled)

    def _size(self, free: int) -> int:
        return session_pages(self._kind.spec, self._kv_budget, self._page_size, free)

    def _take_home(self, facts: ModelFacts) -> None:
        self._kind, self._stores = self._kind_of(facts), stores_of(facts.inner)
        if self._kv_budget is None:
            self._home = self._stores.hold(self._kind, self, self._size)
        else:
            self._home = self._stores.make(self._kind, self._size(0))
        spec, tokens = self._kind.spec, self._home.pool.num_pages * self._page_size
        log.info(
            "session: KV for %d tokens (%.2f GiB) on %s", tokens, tokens * spec.bytes_per_token / 2**30, spec.device
        )

    def _let_go(self) -> None:
        if self._home is not None:
            self._home = None
            self._stores.let_go(self)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionBusy(
                "a call of this session is under way; wait for its end, close its stream, or open a second session"
            )
        try:
            yield
        except KeyboardInterrupt:
            if self._home is not None:
                self._stores.take_back(self)
            raise
        finally:
            self._lock.release()
