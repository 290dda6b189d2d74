"""What runs over one tree: what the next step computes of it, what is preempted, and what comes back."""

from __future__ import annotations

from prefixkit.engine.next_step import Row, Scheduled, first_tokens, next_step
from prefixkit.engine.preemption import Preemption, Run
from prefixkit.engine.runs.beam_run import BeamRun
from prefixkit.engine.runs.detokenizer import Detokenizer
from prefixkit.engine.runs.sample_run import SampleRun
from prefixkit.engine.scheduler import RequestState, Scheduler
from prefixkit.sampling.params import SamplingParams

COMPACT_EVERY = 16  # steps of beams: in so many the tree of a search gets about five nodes deeper


class RunSet:
    """What runs, beside what waits for pages.

    Args:
        scheduler: What waits, and the requests in flight.
        preemption: Takes what runs out of the tree and brings it back.
        detokenizer: Makes the text of what starts from now on.
        prefill_chunk: Prompt tokens that one step computes at most, beside one token for each running sequence.

    Attributes:
        samples, beams: What runs, in the order in which it started.
        waits: Whether something waits for pages, or for its turn.
        bytes_copied: KV copied within the pool so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        preemption: Preemption,
        detokenizer: Detokenizer,
        prefill_chunk: int,
    ) -> None:
        self.scheduler, self.preemption, self.policy = scheduler, preemption, preemption.policy
        self.store, self.tree, self.cache = preemption.store, preemption.store.tree, preemption.store.cache
        self.detokenizer, self.prefill_chunk = detokenizer, prefill_chunk
        self.samples: list[SampleRun] = []
        self.beams: list[BeamRun] = []
        self.waits = False
        self.bytes_copied = 0

    def next(self) -> Scheduled | None:
        """First tokens of what can start now, else a step; None if nothing is left to run.

        What has been running goes on, or is preempted; what waits is admitted beside it.
        """
        scheduled = self._next()
        if scheduled is None and not self.scheduler.idle:
            # Nothing runs, and what is in flight does not fit: nodes that do not end with a page take more than one.
            for state in self.scheduler.in_flight.copy():
                self.scheduler.put_back(state)
            self.cache.clear()
            scheduled = self._next()
            assert scheduled is not None, "a request that passed check_fits must fit an empty pool"
        self.waits = self.scheduler.waits
        return scheduled

    def drop_ended(self) -> None:
        """Forget what has ended with the last step."""
        self.samples = [run for run in self.samples if run.sequence.tree is not None]
        self.beams = [run for run in self.beams if not run.search.done]

    def compact_in_time(self) -> None:
        """Make the tree of beams less deep, if it has not been for some steps, with pages that nothing needs soon."""
        if self.beams and self.beams[0].steps % COMPACT_EVERY == COMPACT_EVERY - 1:
            self._compact(max(0, self.tree.allocator.free - self._growth(self.policy.shortest)))

    def clear(self) -> None:
        """Drop all that runs and waits; what was kept of finished requests stays."""
        left = [run.sequence for run in self.samples] + [one for run in self.beams for one in run.sequences]
        for sequence in left:
            if sequence.tree is not None:  # a step that failed may have released it
                self.tree.release(sequence)
        self.samples, self.beams = [], []
        self.scheduler.close()
        self.preemption.forget()

    # -- one step --------------------------------------------------------------------------------------------------

    def _next(self) -> Scheduled | None:
        self._go_on()
        self._free_pages()
        if self.waits or self.scheduler.waits:
            growth = self._growth(self.policy.longest)
            self.scheduler.admit(growth)
            begun = self._start(growth)
            if begun:
                return first_tokens(begun)
            self._go_on()  # what was copied back has all its KV
        rows: list[Row] = [(run.sequence, run) for run in self.samples if not run.restores]
        rows += [(sequence, run) for run in self.beams if not run.restores for sequence in run.sequences]
        asking = [state for state in self.scheduler.in_flight if state.wants_logits]
        prompts = (state.sequence.node for state in self.scheduler.in_flight)
        computing = any(run.restores for run in self._runs) or any(node.computed < node.length for node in prompts)
        return next_step(self.tree, rows, asking, self.prefill_chunk, computing)

    @property
    def _runs(self) -> list[Run]:
        """What runs, in the order in which it started."""
        return [*self.samples, *self.beams]

    def _growth(self, tokens: int) -> int:
        """Pages that what runs may take with its next tokens."""
        return sum(run.growth(self.tree, tokens) for run in self._runs)

    def _go_on(self) -> None:
        """Let restored sequences go on whose tokens all have KV again."""
        for run in self._runs:
            if run.restores and all(one.node.computed == one.node.length for one in run.sequences):
                last = [tokens[-1] for tokens in run.token_lists]
                if self.cache.free_pages(sum(self.tree.pages_to_extend(one, 1) for one in run.sequences)):
                    self.tree.extend_each(run.sequences, last)
                    run.restores = False

    def _free_pages(self) -> None:
        """Preempt until what runs can go on for some steps."""
        runs = len(self.samples) + sum(len(run.sequences) for run in self.beams)
        if runs * (1 + self.policy.shortest // self.tree.page_size) * 2 <= self.tree.allocator.free:
            return
        while self.samples or self.beams:
            if self.waits:  # what waits may go first
                self._give_back_reserved()
            if self.cache.free_pages(self._growth(self.policy.shortest)):
                return
            free = self.tree.allocator.free
            self._compact(free)
            if self.tree.allocator.free <= free:
                self._preempt()

    def _give_back_reserved(self) -> None:
        leaves = [run.sequence for run in self.samples if run.sequence.node.reserved]
        self.tree.reserve(leaves, [0] * len(leaves))

    def _preempt(self) -> None:
        """Take the samples of the request admitted last out of the tree; of one that is alone, half of them."""
        last = min(reversed(self.scheduler.in_flight), key=lambda state: state.request.priority)
        runs = [run for run in self._runs if run.state is last]
        alone = len(self.scheduler.in_flight) == 1
        chosen = runs[len(runs) // 2 :] if alone else runs
        if len(chosen) == len(runs):
            self.scheduler.put_back(last)  # first, so that none but these runs hold its prompt
        if chosen:
            self.preemption.suspend(chosen)
        last.suspended = [*chosen, *last.suspended]
        last.running -= len(chosen)
        gone = set(chosen)
        self.samples = [run for run in self.samples if run not in gone]
        self.beams = [run for run in self.beams if run not in gone]
        self.waits = True

    def _start(self, growth: int) -> list[Row]:
        """Bring suspended runs back, and fork new ones from prompts with known logits, as far as there are pages.

        Args:
            growth: Pages that what runs already may take with its next tokens.

        Returns:
            The new ones.
        """
        begun: list[Row] = []
        places = self.scheduler.places
        growth += self.scheduler.growth()
        for state in self.scheduler.in_flight:
            while places > 0 and state.ready:
                unit = self.scheduler.unit(state)
                more = unit if state.running else 0  # for the first of a request it is counted
                if state.suspended:
                    run = state.suspended[0]
                    beside = growth - (0 if state.running else unit)
                    if not self.preemption.resume(run, beside, self.scheduler.growth_back(state)):
                        return begun
                    del state.suspended[0]
                    (self.samples if isinstance(run, SampleRun) else self.beams).append(run)
                elif self.cache.free_pages(growth + more):
                    begun.append(self._begin(state))
                else:
                    return begun
                places, growth, state.running = places - 1, growth + more, state.running + 1
        return begun

    def _begin(self, state: RequestState) -> Row:
        """Fork the next sample, or beam search, of a prompt whose logits are known."""
        if isinstance(state.request.params, SamplingParams):
            index = state.request.sample_indices[state.started]
            run = SampleRun.begin(state, index, self.tree, self.detokenizer)
            self.samples.append(run)
            row: Row = run.sequence, run
        else:
            search = BeamRun.begin(state, self.tree.fork(state.sequence)[0], self.detokenizer.decode)
            self.beams.append(search)
            row = search.sequences[0], search
        state.started += 1
        return row

    def _compact(self, most_pages: int) -> None:
        """Make the tree of beams less deep, with so many free pages at most.

        The step under way reads what is copied where it was: the copies wait for it on the device's stream.
        """
        if self.beams:
            source, target = self.tree.compact(most_pages)
            self.store.pool.copy(source, target)
            self.bytes_copied += len(source) * self.store.pool.spec.bytes_per_token
