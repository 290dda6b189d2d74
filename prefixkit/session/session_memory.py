"""What a session holds between calls: pool, tree and runner, one lock, and pinned prefixes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.call import Call
from prefixkit.engine.engine import Engine
from prefixkit.engine.memory import MOST_RUNNING
from prefixkit.engine.policy import EngineSettings, MemoryPolicy
from prefixkit.engine.request import Request
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.limits import left_for_states, session_pages
from prefixkit.kv.store import KVStore
from prefixkit.kv.stores import ModelStores, StoreKind
from prefixkit.models import ModelFacts, patched_facts
from prefixkit.models.model_stores import kind_of, stores_of
from prefixkit.models.tensor_parallel import refuse_sharded
from prefixkit.models.weights.content import kv_version
from prefixkit.session.assembly import engine_of
from prefixkit.session.call_results import MemoryReleased, Result, SessionBusy, Stream, call_of
from prefixkit.session.prompts import Prompt, check_tokenizer
from prefixkit.session.requests import prompt_requests
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.radix import Sequence as TreeSequence

log = logging.getLogger("prefixkit")


@dataclass(frozen=True)
class Pin:
    """A prompt whose KV stays in a session's pool until the pin is released.

    Attributes:
        tokens: The prompt's token ids.
        sequence: The prompt's sequence in the session's tree.
        session: The session whose pool holds the KV.
    """

    tokens: list[int]
    sequence: TreeSequence
    session: SessionMemory

    def __repr__(self) -> str:
        return f"Pin({len(self.tokens)} tokens{', released' if self.sequence.tree is None else ''})"

    def release(self) -> None:
        """Release the pin: its pages may be evicted when others need them.

        Raises:
            SessionBusy: a call of the session, or another one that uses its KV store, is under way.
            ValueError: the pin was released before.
        """
        with self.session._busy():
            tree = self.sequence.tree
            if not isinstance(tree, PrefixTree):
                raise ValueError(f"the pin of {len(self.tokens)} tokens was released before; pin the prompt again")
            store = self.session.store
            if store is None or tree is not store.tree:
                self.sequence.tree = None  # the sequence ended with its tree
                return
            with self.session._lent_store():
                tree.retain(self.sequence)


class SessionMemory:
    """The part of a :class:`prefixkit.Session` that outlives its calls; see there for the arguments.

    Attributes:
        store: The session's KV: pool, tree and prefix cache, for inspection between calls; None once released.
            Sessions without a ``kv_budget`` and ``model.generate()`` share one store if they compute KV alike.
        report: The report of the call under way, or of the last call; empty before the first.
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
        most_running: int = MOST_RUNNING,
        memory: MemoryPolicy | None = None,
    ) -> None:
        patched_facts(model)  # or raise
        check_tokenizer(tokenizer)
        if not isinstance(memory, MemoryPolicy | None):
            raise TypeError(
                f"memory must be a MemoryPolicy, got {type(memory).__name__} {memory!r}; "
                "make one: prefixkit.MemoryPolicy(eviction=..., headroom=...)"
            )
        self.model, self.tokenizer = model, tokenizer
        self._kv_budget, self._page_size, self._compiled = kv_budget, page_size, compiled
        policy = MemoryPolicy() if memory is None else memory
        self._settings = EngineSettings(prefill_chunk, most_running, retain_samples=True, policy=policy)
        self._running: dict[str, object] = {}  # "call": what the call under way is known by
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.store: KVStore | None = None
        self._kind: StoreKind
        self._stores: ModelStores
        self.report = Report()
        self.resume()

    def __repr__(self) -> str:
        held = "memory released" if self.store is None else repr(self.store)
        return f"Session({type(self.model).__name__}, {held})"

    # -- memory --------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Allocate memory for pool and graphs again, after :meth:`release_memory` or :meth:`close`."""
        with self._busy():
            if self.store is None:
                self._acquire_store(patched_facts(self.model))

    def release_memory(self) -> None:
        """Release the pool and the graphs, which are freed once no other session and no call uses them.

        That frees memory for a backward pass, for example; :meth:`resume` allocates it again.
        """
        with self._busy():
            self._release_store()

    def close(self) -> None:
        """End open streams and release the memory, as the end of a ``with`` block does; :meth:`resume` reopens it.

        Raises:
            SessionBusy: a call of this session is under way, as in a callback; only streams between samples can end.
        """
        for stream in list(self._streams):
            stream.cut("the end of its session")
        self.release_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Declare that weights have changed: the prefix cache is emptied, and the next call captures its graphs again.

        Calls detect changed weights themselves, except for a few elements written through ``.data`` or a raw pointer,
        which only ``patch(model, compare_weights="always")`` detects.  CUDA graphs read weights in place; only numbers
        that the host read from weights during the capture are part of a graph.
        """
        with self._busy():
            if self.store is not None:
                with self._lent_store() as store:
                    store.version = None
                    for runner in store.runners.values():
                        runner.drop_graphs()

    def pin(self, prompt: Prompt) -> Pin:
        """Compute a prompt's KV, and hold it in the pool until the pin is released.

        The pin also ends when the session releases its memory, and with a call that Ctrl-C interrupts.

        Args:
            prompt: A string, token ids, or a list of chat messages; see :func:`prefixkit.generate`.

        Raises:
            SessionBusy, MemoryReleased, ValueError, TypeError: as :meth:`generate`.
            KVBudgetTooSmall: the prompt does not fit the pool together with the other pins.
        """
        with self._called() as facts:
            facts.check_lm_head()
            (request,) = prompt_requests(facts, self.tokenizer, [prompt])
            with self._engine(facts, [request.tokens], elsewhere=False) as engine:
                return Pin(request.tokens.tolist(), self._compute(facts, engine, request), self)

    # -- a call --------------------------------------------------------------------------------------------------------

    def _run(self, facts: ModelFacts, requests: list[Request], *listeners: Any) -> Result:
        with self._engine(facts, [request.tokens for request in requests], requests) as engine:
            call = self._call(facts, requests, *listeners)
            return Result(tuple(engine.run(requests, call)), call.report)

    def _compute(self, facts: ModelFacts, engine: Engine, request: Request) -> TreeSequence:
        """Compute a prompt's KV, and pin it."""
        engine.run([request], self._call(facts, [request], False, lambda sample: None))
        return engine.store.pin(request.tokens)

    def _call(self, facts: ModelFacts, requests: Sequence[Request], *listeners: Any) -> Call:
        call = call_of(facts, self.tokenizer, requests, *listeners)
        self.report = call.report
        return call

    @contextmanager
    def _called(self) -> Iterator[ModelFacts]:
        """The facts of the model, during a call of the session."""
        with self._busy():
            yield patched_facts(self.model)

    @contextmanager
    def _engine(
        self,
        facts: ModelFacts,
        prompts: Sequence[NDArray[np.int32]] = (),
        asked: object = None,
        *,
        elsewhere: bool = True,
    ) -> Iterator[Engine]:
        """An engine over a KV store lent to a call, which holds KV of the model's present weights only.

        ``prompts`` are about to use its KV; ``asked`` are arguments that must be equal in all processes that share the
        model; ``elsewhere``: see :meth:`_lent_store`.
        """
        if self.store is None:
            raise MemoryReleased("the session has given its memory back; call resume() first, or open another session")
        self._stores.agreement.check("requests", lambda: (prompts, asked))
        if self._kind_of(facts) != self._kind or self._stores is not stores_of(facts.inner):
            log.info("session: the model's attention layers, or its patch, have changed: pool and graphs are made anew")
            self._release_store()  # first, to free its memory
            self._acquire_store(facts)
        with self._lent_store(elsewhere) as store:
            known, found = store.version is not None, partial(store.tree.longest_match, prompts)
            if store.use_version((self._stores.epoch, kv_version(facts.inner, found, facts.state))) and known:
                log.info("session: the model's weights, adapters or numbers changed: the prefix cache is emptied")
            yield engine_of(facts, store, self._settings, compiled=self._compiled)

    @contextmanager
    def _lent_store(self, elsewhere: bool = False) -> Iterator[KVStore]:
        """The session's store, if no other call uses it.

        If a call of ``generate()`` or of another session uses it, this yields another store where the call may run
        ``elsewhere``, and raises SessionBusy otherwise.
        """
        store = self.store
        assert store is not None, "checked before"
        if self._kv_budget is None and not self._stores.lend(store, self):
            if not elsewhere:
                raise SessionBusy(
                    "another call uses the KV store that the model's sessions share with its generate(); wait for its "
                    "end, or give the session a kv_budget, for a store of its own"
                )
            store = self._stores.borrow(self._kind, self, self._size(self._stores.free(self._kind.spec)))
        try:
            yield store
        except KeyboardInterrupt:
            store.restart()
            raise
        finally:
            self._stores.return_(store)

    def _kind_of(self, facts: ModelFacts) -> StoreKind:
        return kind_of(facts, self._page_size, self._settings.policy.eviction, self._compiled)

    def _size(self, free: int) -> int:
        return session_pages(self._kind.spec, self._kv_budget, self._page_size, free)

    def _acquire_store(self, facts: ModelFacts) -> None:
        refuse_sharded(facts.inner)
        self._kind, self._stores = self._kind_of(facts), stores_of(facts.inner)
        if self._kv_budget is None:
            self.store = self._stores.hold(self._kind, self, self._size)
        else:
            self.store = self._stores.make(self._kind, self._size(0))
        spec, tokens = self._kind.spec, self.store.pool.num_pages * self._page_size
        self.store.most_state_bytes = left_for_states(spec, self._kv_budget, tokens)
        log.info(
            "session: KV for %d tokens (%.2f GiB) on %s", tokens, tokens * spec.bytes_per_token / 2**30, spec.places
        )
        if spec.states:
            most = self.store.state_bytes_allowed / 2**30
            log.info("session: states of %d bytes, up to %.2f GiB of them, in place of KV", spec.bytes_per_state, most)

    def _release_store(self) -> None:
        if self.store is not None:
            self.store = None
            self._stores.release_holder(self)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        running, mine = self._running, object()
        # Not a lock: where Ctrl-C comes as its acquire() returns, the call cannot tell whether it holds the lock.
        try:
            if running.setdefault("call", mine) is not mine:
                raise SessionBusy(
                    "a call of this session is under way; wait for its end, close its stream, or open a second session"
                )
            yield
        except KeyboardInterrupt:
            if self.store is not None and running.get("call") is mine:
                self._stores.reclaim(self)
            raise
        finally:
            if "call" in running and running["call"] is mine:  # Python looks for signals after function calls alone
                running.pop("call")
