"""What waits, what runs, and what comes next: admission, preemption, and the start of runs.

Nothing here runs a model.  Prompts wait until there are pages for what they need now.  What runs may grow beyond the
store later: then the request admitted last is preempted (`prefixkit.engine.preemption`), and waits again.
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
from prefixkit.engine.request_state import RequestState, WaitingQueue, admission_order
from prefixkit.engine.runs.beam_run import BeamRun
from prefixkit.engine.runs.run_protocol import Run
from prefixkit.engine.runs.sample_run import SampleRun
from prefixkit.kv.held import MOST_AHEAD
from prefixkit.kv.store import KVStore
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import Sequence
from prefixkit.tree.state_slots import want
from prefixkit.tree.tokens import forks_of

COMPACT_EVERY = 16  # steps of beams, in which the tree of a search gets about five nodes deeper


class Scheduler:
    """The requests of a call: those that wait, and those in flight with their runs.

    Requests of a higher priority go first, then those submitted earlier; of one submission, in lexicographic order of
    their tokens: those that share a prefix follow each other.  One that has waited for more than the policy's
    ``patience`` goes before all others.  Results are independent of this order.

    Args:
        store: Where prompts and runs live.
        call: What comes with the call.
        settings: How the call runs.

    Attributes:
        steps: Steps so far.
        queue: What waits.
        in_flight: Requests whose prompts are in the tree, in the order of admission.
        runs: What runs, in the order in which it started or came back: the keys.
        started: The runs among them that :meth:`start_ahead` has started, and their sequences.
        preemption: Takes runs out of the tree and brings them back.
        bytes_copied: KV copied within the pool so far.
        had_waiting: Whether :attr:`has_waiting` when the step under way was scheduled.
    """

    def __init__(self, store: KVStore, call: Call, settings: EngineSettings) -> None:
        self.store, self.call, self.settings, self.policy = store, call, settings, settings.policy
        if store.held is not None:
            # A sample that has given KV back cannot be preempted: it starts where all that it will ever hold fits.
            self.policy = replace(self.policy, headroom=sys.maxsize)
        self.preemption = Preemption(store, self.policy)
        self.queue, self.in_flight, self.runs = WaitingQueue(), list[RequestState](), dict[Run, None]()
        self.started = list[Row]()
        self.steps = self.bytes_copied = 0
        self.had_waiting = False
        self._orders, self._most_states = count(), 1
        self._of_prompts: dict[int, RequestState] = {}  # those in flight, by their prompts' sequences

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
        """Whether something waits for pages, or for a slot among those that run."""
        return bool(self.queue) or any(state.has_waiting for state in self.in_flight)

    @property
    def slots_left(self) -> int:
        """How many more runs may run."""
        left = max(0, self.settings.most_running - len(self.runs))
        return left if (states := self.store.tree.states) is None else min(left, self._runs_with_states(states.count))

    def _runs_with_states(self, slots: int, prompts: int = 0) -> int:
        """How many more runs there are slots for states for, beside those of what is in flight and more ``prompts``."""
        held = sum(states_per_run(run.state.request.params) for run in self.runs)
        return max(0, slots - held - STATES_PER_PROMPT * (1 + prompts + len(self.in_flight))) // self._most_states

    def finish(self, run: Run) -> None:
        """Count a run that has ended; after its last one a request is retired."""
        state = run.state
        del self.runs[run]
        state.finished += 1
        state.running -= 1
        if state.finished == state.wanted:
            self.retire(state)

    def retire(self, state: RequestState) -> None:
        """A request has finished: its prompt is retained in the prefix cache."""
        self.in_flight.remove(state)
        self._of_prompts.pop(state.sequence.id, None)
        self.store.retain(state.sequence)
        state.prompt = state.first_logits = None

    def requeue(self, state: RequestState) -> None:
        """Let a request wait again: its prompt stays in the prefix cache until its pages are needed."""
        self.retire(state)
        state.waiting_since = self.steps
        self.queue.add(state)

    def close(self) -> None:
        """Drop all that runs and waits; what was retained of finished requests stays."""
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
        """Insert waiting prompts until one does not fit beside ``lookahead`` pages for what runs."""
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
        """How many more prompts may be in flight, of each of which a run is to start."""
        starting, states = sum(not state.running for state in self.in_flight), self.store.tree.states
        left = self.settings.most_running - len(self.runs)
        return (left if states is None else min(left, self._runs_with_states(states.count, prompts=1))) - starting

    def _pages_to_start(self) -> int:
        """Pages for the first tokens of prompts in flight of which nothing runs yet."""
        return sum(self._pages_of_next_run(state) for state in self.in_flight if not state.running)

    def _pages_of_next_run(self, state: RequestState) -> int:
        """Pages for another run's next tokens; of one that was preempted, for those that it has too."""
        size, tokens = self.store.tree.page_size, self.policy.longest
        if not state.preempted:
            return lookahead_pages(state.request.params, size, tokens, self.store.held)
        run: Run = state.preempted[0]
        own = sum(pages_for(len(chosen) - 1, size) for chosen in run.token_lists)
        return own + run.pages_to_resume(size, tokens)

    def _known_logits(self, prompt: Sequence) -> Tensor | None:
        """The first logits of an equal prompt in flight, if they are known; all that want them get them at once."""
        for end in prompt.node.sequences:
            state = self._of_prompts.get(end)
            if state is not None and (state.first_logits is not None or state.wants_logits):
                return state.first_logits
        return None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next(self) -> Scheduled | None:
        """First tokens of what can start now, else a step; None if nothing is left to run.

        What has been running goes on, or is preempted; what waits is admitted beside it.
        """
        scheduled = self._next()
        if scheduled is None and not self.idle:
            # Nothing runs, and what is in flight does not fit: nodes that do not end with a page take more than one.
            for state in self.in_flight.copy():
                self.requeue(state)
            self.store.cache.clear()
            scheduled = self._next()
            assert scheduled is not None, "a request that passed check_fits must fit an empty store"
        self.had_waiting = self.has_waiting
        return scheduled

    def start_ahead(self, scheduled: Scheduled) -> None:
        """Start runs in the slots of ended ones while steps of ``scheduled`` are under way, as far as that is safe.

        Those that run have reserved all pages that they may need, and nothing is evicted or brought back for the new
        ones: a fork of a prompt takes no page and leaves all nodes as they are.
        """
        slots, size, free = self.slots_left, self.store.tree.page_size, self.store.tree.allocator.free
        if not (slots and self.had_waiting and scheduled.pipelined and scheduled.most_steps == sys.maxsize):
            return
        pages = len(self.started) * pages_for(self.policy.longest, size)
        most = pages + (slots + len(self.in_flight)) * pages_for(self.policy.longest, size)
        if most <= free and not any(state.preempted or state.request.params.forks for state in self.in_flight):
            self.started += self._start_runs(pages)

    def take_started(self) -> Scheduled | None:
        """The first tokens of the runs that were started ahead; None where there are none."""
        started, self.started = self.started, []
        return first_tokens(started)

    def compact_in_time(self) -> None:
        """Make the tree of runs that fork less deep, every ``COMPACT_EVERY`` steps, with pages to spare."""
        if self.steps % COMPACT_EVERY == COMPACT_EVERY - 1:
            self._compact(max(0, self.store.tree.allocator.free - self._lookahead(self.policy.shortest)))

    def _next(self) -> Scheduled | None:
        self._resume_recomputed()
        lookahead = self._lookahead(self.policy.longest)
        if lookahead > self.store.tree.allocator.free:
            self._free_pages()
            lookahead = self._lookahead(self.policy.longest)
        if self.had_waiting or self.has_waiting:
            if started := self._admit_and_start(lookahead):
                return first_tokens(started)
            self._resume_recomputed()  # what was copied back has all its KV
        rows: list[Row] = [(one, run) for run in self.runs if not run.recomputing for one in run.sequences]
        asking = [state for state in self.in_flight if state.wants_logits]
        prompts = (state.sequence.node for state in self.in_flight)
        computing = any(run.recomputing for run in self.runs) or any(node.computed < node.length for node in prompts)
        chunk = self.settings.chunk_for(self.store.pool.spec.device)
        most_steps = sys.maxsize if self.store.held is None else MOST_AHEAD
        return next_step(self.store.tree, rows, asking, chunk, computing, most_steps)

    def _admit_and_start(self, lookahead: int) -> list[Row]:
        """Admit what waits and start runs; pages that leaves have reserved are for these where there are no others."""
        self.admit(lookahead)
        started = self._start_runs(lookahead)
        if self.store.tree.reserved and self.slots_left and self.has_waiting:
            self._give_back_reserved()
            lookahead = self._lookahead(self.policy.longest)
            self.admit(lookahead)
            started += self._start_runs(lookahead)
        return started

    def _lookahead(self, tokens: int) -> int:
        """Pages that what runs may take with its next tokens."""
        tree, held = self.store.tree, self.store.held
        if held is None:
            return sum(run.lookahead_pages(tree, tokens) for run in self.runs)
        left = [held.pages_left(run.sequences[0], tree.page_size) for run in self.runs]  # none are beams
        return sum(min(run.lookahead_pages(tree, tokens), most) for run, most in zip(self.runs, left, strict=True))

    def _resume_recomputed(self) -> None:
        """Let runs go on that were preempted and whose tokens all have KV again."""
        tree = self.store.tree
        for run in self.runs:
            if run.recomputing and all(one.node.computed == one.node.length for one in run.sequences):
                last = [tokens[-1] for tokens in run.token_lists]
                if self.store.cache.free_pages(sum(tree.pages_to_extend(one, 1) for one in run.sequences)):
                    tree.extend_each(run.sequences, last)
                    run.recomputing = False

    def _free_pages(self) -> None:
        """Preempt until what runs can go on for some steps."""
        allocator = self.store.tree.allocator
        while self.runs:
            if self.store.cache.free_pages(self._lookahead(self.policy.shortest)):
                return
            if self.store.tree.reserved:
                self._give_back_reserved()
                continue
            free = allocator.free
            self._compact(free)
            if allocator.free <= free:
                self._preempt()

    def _give_back_reserved(self) -> None:
        leaves = [one for run in self.runs for one in run.sequences if one.node.reserved]
        self.store.tree.reserve(leaves, [0] * len(leaves))

    def _preempt(self) -> None:
        """Take the runs of the request admitted last out of the tree; of one that is alone, half of them."""
        last = min(reversed(self.in_flight), key=lambda state: state.request.priority)
        runs = [run for run in self.runs if run.state is last]
        chosen = runs[len(runs) // 2 :] if len(self.in_flight) == 1 else runs
        if len(chosen) == len(runs):
            self.requeue(last)  # first, so that none but these runs hold its prompt
        if chosen:
            self.preemption.preempt(chosen)
        last.preempted = [*chosen, *last.preempted]
        last.running -= len(chosen)
        for run in chosen:
            del self.runs[run]
        self.had_waiting = True

    def _start_runs(self, lookahead: int) -> list[Row]:
        """Bring preempted runs back, and start new ones from prompts with known logits; returns the new ones.

        That is as far as there are pages beside ``lookahead`` for what runs already.
        """
        started: list[Row] = []
        slots, tree = self.slots_left, self.store.tree
        lookahead += self._pages_to_start()
        for state in self.in_flight:
            kind: type[Run] = BeamRun if state.request.params.forks else SampleRun
            while slots > 0 and state.ready:
                pages = self._pages_of_next_run(state)
                more = pages if state.running else 0  # for the first of a request they are counted
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
        """Make the tree of runs that fork less deep, with ``most_pages`` free pages at most.

        The step under way reads what is copied where it was: the copies wait for it on the device's stream.
        """
        if any(not run.streams for run in self.runs):
            source, target = self.store.tree.compact(most_pages)
            self.store.pool.copy(source, target)
            self.bytes_copied += len(source) * self.store.pool.spec.bytes_per_token
