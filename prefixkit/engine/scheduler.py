"""The scheduler: admission of requests, start and preemption of runs, and the choice of the next step.

The scheduler runs no model.  A prompt waits until there are pages for its immediate need.  When running sequences
outgrow the store, the request admitted last is preempted (`prefixkit.engine.preemption`), and waits again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from torch import Tensor

from prefixkit.engine.call import Call
from prefixkit.engine.memory import STATES_PER_PROMPT, lookahead_pages, states_per_run
from prefixkit.engine.next_step import Row, Scheduled, first_tokens, next_step
from prefixkit.engine.policy import EngineSettings
from prefixkit.engine.preemption import Preemption
from prefixkit.engine.request import Request
from prefixkit.engine.request_state import RequestState, WaitingQueue, admission_order, prompts_come_first
from prefixkit.engine.runs.beam_run import BeamRun
from prefixkit.engine.runs.run_protocol import Run
from prefixkit.engine.runs.sample_run import SampleRun
from prefixkit.kv.held import MOST_AHEAD
from prefixkit.kv.store import KVStore
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import Sequence
from prefixkit.tree.state_slots import want
from prefixkit.tree.tokens import forks_of

COMPACT_EVERY = 16  # steps of a beam search, after which its tree is about five nodes deeper


class Scheduler:
    """The requests of a call: those that wait, and those in flight with their runs.

    Requests of a higher priority are admitted first, then those submitted earlier; requests of one submission are
    admitted in lexicographic order of their tokens, so that those that share a prefix follow each other.  A request
    that has waited for more than ``patience`` steps is admitted before all others.  Results do not depend on the order.

    Args:
        store: Holds the KV of prompts and runs.
        call: The call's listeners, detokenizer and report.
        settings: How the call runs.

    Attributes:
        steps: Number of steps so far.
        queue: Requests that wait.
        in_flight: Requests whose prompts are in the tree, in the order of admission.
        runs: The running runs, as keys, in the order in which they started or resumed.
        started: The runs among them that :meth:`start_ahead` has started, with their sequences.
        preemption: Removes runs from the tree and resumes them.
        bytes_copied: KV bytes copied within the pool so far.
        had_waiting: The value of :attr:`has_waiting` when the step under way was scheduled.
    """

    def __init__(self, store: KVStore, call: Call, settings: EngineSettings) -> None:
        self.store, self.call, self.settings, self.policy = store, call, settings, settings.policy
        if store.held is not None:
            # A sample that has released KV cannot be preempted, so it starts only once its largest need of KV fits.
            self.policy = replace(self.policy, headroom=sys.maxsize)
        self.preemption = Preemption(store, self.policy)
        self.queue, self.in_flight, self.runs = WaitingQueue(), list[RequestState](), dict[Run, None]()
        self.started, self._chunk = list[Row](), settings.chunk_for(store.pool.spec.device)
        self.steps = self.bytes_copied = 0
        self.had_waiting = False
        self._orders, self._most_states = count(), 1
        self._of_prompts: dict[int, RequestState] = {}  # requests in flight, by the id of their prompt's sequence

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests that :func:`check_fits` has passed."""
        ordered = admission_order(requests)
        self._most_states = max([self._most_states, *(states_per_run(request.params) for request in ordered)])
        forks = forks_of([request.tokens for request in ordered]) if self.store.tree.states is not None else []
        for place, request in enumerate(ordered):
            state = RequestState(request, next(self._orders), self.steps)
            state.forks = forks[place] if forks else ()
            self.queue.add(state)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not self.queue and not self.in_flight

    @property
    def has_waiting(self) -> bool:
        """Whether a request or a run waits for pages or for a running slot."""
        return bool(self.queue) or any(state.has_waiting for state in self.in_flight)

    @property
    def slots_left(self) -> int:
        """How many more runs may start."""
        left = max(0, self.settings.most_running - len(self.runs))
        return left if (states := self.store.tree.states) is None else min(left, self._runs_with_states(states.count))

    def _runs_with_states(self, slots: int, prompts: int = 0) -> int:
        """How many more runs find state slots, after those for requests in flight and for ``prompts`` more prompts."""
        held = sum(states_per_run(run.state.request.params) for run in self.runs)
        return max(0, slots - held - STATES_PER_PROMPT * (1 + prompts + len(self.in_flight))) // self._most_states

    def finish(self, run: Run) -> None:
        """Count a run that has ended, and retire its request after the last run."""
        state = run.state
        del self.runs[run]
        state.finished += 1
        state.running -= 1
        if state.finished == state.wanted:
            self.retire(state)

    def retire(self, state: RequestState) -> None:
        """Take a request out of flight; its prompt's KV is retained in the prefix cache."""
        self.in_flight.remove(state)
        self._of_prompts.pop(state.sequence.id, None)
        self.store.retain(state.sequence)
        state.prompt = state.first_logits = None

    def requeue(self, state: RequestState) -> None:
        """Queue a request again: its prompt's KV stays in the prefix cache until the pages are needed."""
        self.retire(state)
        state.waiting_since = self.steps
        self.queue.add(state)

    def close(self) -> None:
        """Drop all running and waiting requests; KV retained of finished requests stays."""
        for sequence in [sequence for run in self.runs for sequence in run.sequences]:
            if sequence.tree is not None:  # a step that failed may have released it
                self.store.tree.release(sequence)
        for state in self.in_flight:
            self.store.tree.release(state.sequence)
        self.runs, self.started, self.queue = {}, [], WaitingQueue()
        self.in_flight.clear()
        self._of_prompts.clear()
        self.preemption.free_swap_space()

    # -- admission -----------------------------------------------------------------------------------------------------

    def admit(self, lookahead: int) -> None:
        """Insert waiting prompts until one does not fit besides ``lookahead`` pages for running sequences."""
        slots = self._prompts_left
        lookahead += self._pages_to_start() if self.queue else 0
        while self.queue and slots > 0:
            state = self.queue.next(self.steps - self.policy.patience)
            pages = self._pages_of_next_run(state)
            state.prompt = self.store.admit(state.request.tokens, lookahead + pages, alone=not self.in_flight)
            if state.prompt is None:
                return
            want(state.prompt.node, state.forks)
            state.first_logits = self._known_logits(state.prompt)
            self.in_flight.append(state)
            self._of_prompts[state.prompt.id] = state
            self.queue.remove(state)
            slots, lookahead = slots - 1, lookahead + pages
            if self.store.tree.states is not None:
                slots = self._prompts_left

    @property
    def _prompts_left(self) -> int:
        """How many more prompts may be in flight, if a run of each is to start."""
        starting, states = sum(not state.running for state in self.in_flight), self.store.tree.states
        left = self.settings.most_running - len(self.runs)
        return (left if states is None else min(left, self._runs_with_states(states.count, prompts=1))) - starting

    def _pages_to_start(self) -> int:
        """Pages for the first tokens of runs of those requests in flight that have no running run."""
        return sum(self._pages_of_next_run(state) for state in self.in_flight if not state.running)

    def _pages_of_next_run(self, state: RequestState) -> int:
        """Pages for the next tokens of the next run; of a preempted run, also for its tokens so far."""
        size, tokens = self.store.tree.page_size, self.policy.longest
        if not state.preempted:
            return lookahead_pages(state.request.params, size, tokens, self.store.held)
        run: Run = state.preempted[0]
        own = sum(pages_for(len(chosen) - 1, size) for chosen in run.token_lists)
        return own + run.pages_to_resume(size, tokens)

    def _known_logits(self, prompt: Sequence) -> Tensor | None:
        """The first logits of an equal prompt in flight, if they are known; all that want them get them in one step."""
        for end in prompt.node.sequences:
            state = self._of_prompts.get(end)
            if state is not None and (state.first_logits is not None or state.wants_logits):
                return state.first_logits
        return None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next(self) -> Scheduled | None:
        """Sampling of first tokens for runs that can start now, else a step; None if nothing is left to run.

        Running runs continue or are preempted; waiting requests are admitted as far as they fit.
        """
        scheduled = self._next()
        if scheduled is None and not self.idle:
            # Nothing runs, and nothing in flight fits: where nodes end inside a page, its tokens take several pages.
            for state in self.in_flight.copy():
                self.requeue(state)
            self.store.cache.clear()
            scheduled = self._next()
            assert scheduled is not None, "a request that passed check_fits must fit an empty store"
        self.had_waiting = self.has_waiting
        return scheduled

    def start_ahead(self, scheduled: Scheduled) -> None:
        """Start runs in the slots of ended ones while steps of ``scheduled`` are under way, where that is safe.

        It is safe where the running sequences have reserved all pages that they may need, and where new runs need no
        eviction or resumption: forking a prompt takes no page and changes no node.
        """
        slots, size, free = self.slots_left, self.store.tree.page_size, self.store.tree.allocator.free
        if not (slots and self.had_waiting and scheduled.pipelined and scheduled.most_steps == sys.maxsize):
            return
        pages = len(self.started) * pages_for(self.policy.longest, size)
        most = pages + (slots + len(self.in_flight)) * pages_for(self.policy.longest, size)
        if most <= free and not any(state.preempted or state.request.params.forks for state in self.in_flight):
            self.started += self._start_runs(pages)

    def pop_started(self) -> Scheduled | None:
        """Sampling of the first tokens of runs that were started ahead; None if there are none."""
        started, self.started = self.started, []
        return first_tokens(started)

    def compact_in_time(self) -> None:
        """Make the tree of forking runs less deep every ``COMPACT_EVERY`` steps, with pages not needed soon."""
        if self.steps % COMPACT_EVERY == COMPACT_EVERY - 1:
            self._compact(max(0, self.store.tree.allocator.free - self._lookahead(self.policy.shortest)))

    def _next(self) -> Scheduled | None:
        self._resume_recomputed()
        lookahead = self._lookahead(self.policy.longest)
        free, streams = self.store.tree.allocator.free, all(run.streams for run in self.runs)
        if lookahead > free and not (streams and self.store.cache.free_pages_or_none(lookahead)):
            self._free_pages()
            lookahead = self._lookahead(self.policy.longest)
        if self.had_waiting or self.has_waiting:
            if started := self._admit_and_start(lookahead):
                return first_tokens(started)
            self._resume_recomputed()  # runs that were swapped in have all their KV
        rows: list[Row] = [(one, run) for run in self.runs if not run.recomputing for one in run.sequences]
        asking = [state for state in self.in_flight if state.wants_logits]
        computing = any(run.recomputing for run in self.runs) or not all(state.computed for state in self.in_flight)
        most_steps = sys.maxsize if self.store.held is None else MOST_AHEAD
        return next_step(self.store.tree, rows, asking, self._chunk, computing, most_steps)

    def _admit_and_start(self, lookahead: int) -> list[Row]:
        """Admit requests and start runs; if pages run out, leaves give up reserved pages for them."""
        self.admit(lookahead)
        alone = not (self.runs or self.queue or self.call.on_token)
        if alone and prompts_come_first(self.in_flight, self.slots_left, self._chunk):
            return []
        started = self._start_runs(lookahead)
        if self.store.tree.reserved and self.slots_left and self.has_waiting:
            self._release_reserved()
            lookahead = self._lookahead(self.policy.longest)
            self.admit(lookahead)
            started += self._start_runs(lookahead)
        return started

    def _lookahead(self, tokens: int) -> int:
        """Pages that running runs may take with the next ``tokens`` tokens of each sequence."""
        tree, held = self.store.tree, self.store.held
        if held is None:
            return sum(run.lookahead_pages(tree, tokens) for run in self.runs)
        left = [held.pages_left(run.sequences[0], tree.page_size) for run in self.runs]  # none are beams
        return sum(min(run.lookahead_pages(tree, tokens), most) for run, most in zip(self.runs, left, strict=True))

    def _resume_recomputed(self) -> None:
        """Continue preempted runs whose tokens have all been recomputed."""
        tree = self.store.tree
        for run in self.runs:
            if run.recomputing and all(one.node.computed == one.node.length for one in run.sequences):
                last = [tokens[-1] for tokens in run.token_lists]
                if self.store.cache.free_pages(sum(tree.pages_to_extend(one, 1) for one in run.sequences)):
                    tree.extend_each(run.sequences, last)
                    run.recomputing = False

    def _free_pages(self) -> None:
        """Preempt until the other runs have pages for some steps."""
        allocator = self.store.tree.allocator
        while self.runs:
            if self.store.cache.free_pages(self._lookahead(self.policy.shortest)):
                return
            if self.store.tree.reserved:
                self._release_reserved()
                continue
            free = allocator.free
            self._compact(free)
            if allocator.free <= free:
                self._preempt()

    def _release_reserved(self) -> None:
        leaves = [one for run in self.runs for one in run.sequences if one.node.reserved]
        self.store.tree.reserve(leaves, [0] * len(leaves))

    def _preempt(self) -> None:
        """Preempt all runs of the request admitted last, or half of them if no other request is in flight."""
        last = min(reversed(self.in_flight), key=lambda state: state.request.priority)
        runs = [run for run in self.runs if run.state is last]
        chosen = runs[len(runs) // 2 :] if len(self.in_flight) == 1 else runs
        if len(chosen) == len(runs):
            self.requeue(last)  # first, so that only these runs hold its prompt
        if chosen:
            self.preemption.preempt(chosen)
        last.preempted = [*chosen, *last.preempted]
        last.running -= len(chosen)
        for run in chosen:
            del self.runs[run]
        self.had_waiting = True

    def _start_runs(self, lookahead: int) -> list[Row]:
        """Resume preempted runs, and start new ones from prompts with known logits; returns the new ones.

        Runs start while there are pages besides the ``lookahead`` pages for the running ones.
        """
        started: list[Row] = []
        slots, tree = self.slots_left, self.store.tree
        lookahead += self._pages_to_start()
        for state in self.in_flight:
            kind: type[Run] = BeamRun if state.request.params.forks else SampleRun
            while slots > 0 and state.ready:
                pages = self._pages_of_next_run(state)
                more = pages if state.running else 0  # _pages_to_start has counted the first run of a request
                if state.preempted:
                    run: Run = state.preempted[0]
                    own = run.pages_to_resume(tree.page_size, self.policy.longest)
                    if not self.preemption.resume(run, lookahead + more - pages, own):
                        return started
                    del state.preempted[0]
                elif self.store.cache.free_pages(lookahead + more):
                    run = kind.start(state, tree, self.call)
                    state.started += 1
                    started.append((run.sequences[0], run))
                else:
                    return started
                self.runs[run] = None
                slots, lookahead, state.running = slots - 1, lookahead + more, state.running + 1
        return started

    def _compact(self, most_pages: int) -> None:
        """Make the tree of forking runs less deep, with at most ``most_pages`` free pages.

        The step under way reads the KV in its old slots: the copies wait for the step on the device's stream.
        """
        if any(not run.streams for run in self.runs):
            source, target = self.store.tree.compact(most_pages)
            self.store.pool.copy(source, target)
            self.bytes_copied += len(source) * self.store.pool.spec.bytes_per_token
