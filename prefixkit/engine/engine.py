"""The engine, which runs calls over one KV store: samples and searches in a loop, scores and values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.call import Call
from prefixkit.engine.frozen_heap import frozen_heap
from prefixkit.engine.loop import Loop, counters_of_cache
from prefixkit.engine.memory import MOST_RUNNING, check_fits, have_states
from prefixkit.engine.policy import EngineSettings
from prefixkit.engine.request import Request, Sample
from prefixkit.engine.scheduler import Scheduler
from prefixkit.engine.scoring.context_run import ContextRun
from prefixkit.engine.scoring.contexts import Text
from prefixkit.engine.scoring.score import Head, Score, score, values
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Runner


class Engine:
    """Samples and searches many sequences over one KV store, a call at a time.

    Args:
        runner: Runs steps, and samples from logits.
        store: Holds the KV; no other call may use it during a call of the engine.
        settings: How calls run; None: the defaults of :class:`EngineSettings`.
        state: What the model computes with, read just before the first call; None: the runner reads it.
    """

    def __init__(
        self, runner: Runner, store: KVStore, settings: EngineSettings | None = None, state: object = None
    ) -> None:
        self.runner, self.store, self._state = runner, store, state
        self.settings = EngineSettings() if settings is None else settings

    def run(self, requests: Iterable[Request], call: Call) -> list[Sample]:
        """Run requests to their end and return their samples, if the call returns samples, by prompt, then index.

        Raises:
            KVBudgetTooSmall: some request cannot run even alone; raised before any request starts.
        """
        finished = [sample for sample in self.stream(requests, call) if call.return_samples]
        return sorted(finished, key=lambda sample: (sample.prompt_index, sample.index))

    def stream(self, requests: Iterable[Request], call: Call) -> Iterator[Sample]:
        """Run requests as :meth:`run` does, and yield each sample as it finishes."""
        requests = list(requests)
        check_fits(requests, self.store.budget())
        prompts = [(f"prompt {request.prompt_index}", len(request.tokens)) for request in requests]
        self.store.check_spans(prompts, self.settings.chunk_for(self.store.pool.spec.device))
        have_states(self.store, requests, min(self.settings.most_running, MOST_RUNNING))
        loop = self.loop(call)
        try:
            with frozen_heap(requests):
                loop.start(requests)
                while not loop.scheduler.idle:
                    yield from loop.step()
        except KeyboardInterrupt:
            self.store.restart()  # the interrupt may have left the tree in a state in which it cannot be released
            raise
        finally:
            loop.end()

    def loop(self, call: Call) -> Loop:
        """The loop of a call; it has not started, but the runner has."""
        self.runner.start_call(self._take_state())
        scheduler = Scheduler(self.store, call, self.settings)
        return Loop(self.runner, self.store, scheduler, call)

    def score(
        self,
        prompts: Ordered[NDArray[np.int32]],
        continuations: Ordered[Ordered[NDArray[np.int32]]],
        vocab: int,
        report: Report,
    ) -> list[list[Score]]:
        """The score of each continuation of each prompt; see ``engine/scoring/score.py``."""
        with self._contexts(report) as run:
            return score(run, prompts, continuations, vocab)

    def values(self, texts: Ordered[Text], head: Head, report: Report) -> list[Tensor]:
        """The output of a head for the hidden states at wanted tokens; see ``engine/scoring/score.py``."""
        with self._contexts(report) as run:
            return values(run, texts, head)

    def _take_state(self) -> object:
        """What the model computes with, for the first call; later ones read it anew."""
        state, self._state = self._state, None
        return state

    @contextmanager
    def _contexts(self, report: Report) -> Iterator[ContextRun]:
        """Start and end a call without a loop; after an interrupt the store has a new tree."""
        began, cache = time.perf_counter(), self.store.cache
        self.runner.start_call(self._take_state())
        report.start(lambda: {**self.runner.counters(), **counters_of_cache(cache)})
        try:
            chunk = self.settings.chunk_for(self.store.pool.spec.device)
            yield ContextRun(self.runner, self.store, chunk, report)
        except KeyboardInterrupt:
            self.store.restart()
            raise
        finally:
            report.seconds += time.perf_counter() - began
            report.graph_bytes = self.runner.graph_bytes
            report.end()
