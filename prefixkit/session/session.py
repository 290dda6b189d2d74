"""A session: KV pool, tree, CUDA graphs and compiled layers of a patched model, kept from call to call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

from prefixkit.engine.memory import check_fits
from prefixkit.engine.request import BeamFields, BeamParams, Request, Sample, TokenEvent
from prefixkit.engine.scoring.score import Head
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.prefixes.transfer import load_prefixes, save_prefixes
from prefixkit.kv.prefixes.write import check_place
from prefixkit.models import ModelFacts, UnsupportedVariant, patched_facts
from prefixkit.models.weights.model_fingerprint import kv_origin
from prefixkit.paths import as_path
from prefixkit.sampling.params import SamplingFields, SamplingParams, as_seed
from prefixkit.session.call_results import MemoryReleased, Result, SessionBusy, Stream
from prefixkit.session.prompts import Prompt
from prefixkit.session.requests import (
    Prompts,
    checked_requests,
    marked_tokens,
    prompt_requests,
    requests_for,
    scored_tokens,
)
from prefixkit.session.search import SearchNode, check_nodes, in_step, with_tokens
from prefixkit.session.search_steps import Until, append_samples, step_requests
from prefixkit.session.session_memory import Pin, SessionMemory
from prefixkit.tree.radix import Sequence as TreeSequence

__all__ = ["MemoryReleased", "Pin", "Result", "Session", "SessionBusy"]


class Session(SessionMemory):
    """What sampling from one model needs again and again, made once: the second call costs its steps.

    A call at a time: a session that is busy raises :class:`SessionBusy`.  Two sessions may run in two threads, on one
    model or on two; a call that finds the shared store in use runs in another one.  A call that raises leaves the
    session usable.

    The KV of prompts and samples stays in the pool when a call ends, until its pages are needed: a prompt that begins
    as an earlier one did, or goes on where a sample ended, computes only its own tokens.  KV of other weights is never
    used: what was written to between calls, or another adapter, is noticed (docs/howto/memory.md says how).
    Where steps cannot run in CUDA graphs, for lack of memory too, a call decodes step by step, with one log line.

    Args:
        model, tokenizer, page_size, prefill_chunk: As for :func:`prefixkit.generate`.
        kv_budget: KV that a store of the session's own holds, in bytes or as a size such as ``"40GiB"``; None: the
            session shares a store with the model's own ``generate()`` and with other such sessions, of half of the
            memory that is free.  It is made at once and does not grow; what does not fit at once waits, or is
            preempted.
        compiled: On a GPU, run layers through torch.compile, after some seconds of compiling: once for each model,
            whose later sessions use the same, and less where torch finds it in its cache on disk.  The first call that
            samples more than a few tokens compiles them; others, scores and values run through them afterwards.
        most_running: Samples, or beam searches, that run at once at most; the rest wait.
        memory: What is evicted first, and what becomes of requests that no longer fit; None: :class:`MemoryPolicy`'s
            own choices.

    Raises:
        NotPatched: the model is not patched.
        ValueError: a parameter is out of range, or the budget holds no page.
    """

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_samples: bool = True,
        on_sample: Callable[[Sample], None] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_step: Callable[[int], None] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Result:
        """Sample continuations of each prompt.

        Args:
            prompts, params, return_samples, on_sample, on_token, on_step, fields: As for :func:`prefixkit.generate`.

        Raises:
            SessionBusy: a call of this session is under way.
            MemoryReleased: the session has ended or has given its memory back.
            KVBudgetTooSmall: one of the sequences does not fit the pool.
            ValueError, TypeError: as :func:`prefixkit.generate`.
        """
        with self._called() as facts:
            requests = requests_for(SamplingParams, facts, self.tokenizer, prompts, params, fields)
            return self._run(facts, requests, return_samples, on_sample, on_token, on_step)

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Stream:
        """As :meth:`generate`, but gives each sample as it finishes and returns none.

        Everything is checked before this returns.  The session is busy from the first sample that is asked for until
        the iterator ends or is closed, as it is when the last reference to it goes; samples that have not finished then
        are dropped.  Where the session is busy or has no memory when the first is asked for, the iterator raises that,
        and begins once it is asked again.  One that an error or the session's end cut short raises ValueError then.

        Args:
            prompts, params, on_token, fields: As for :func:`prefixkit.generate`.
        """
        with self._called() as facts:
            requests = requests_for(SamplingParams, facts, self.tokenizer, prompts, params, fields)
            with self._engine(facts) as engine:
                check_fits(requests, engine.store.budget())

        def samples() -> Generator[Any, None, None]:
            with (
                self._called() as facts,
                self._engine(facts, [request.tokens for request in requests], requests) as engine,
            ):
                call = self._call(facts, requests, True, None, on_token)
                yield  # it has begun
                yield from engine.stream(requests, call)

        self._streams.add(stream := Stream(samples))
        return stream

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamParams | Sequence[BeamParams] | None = None,
        *,
        on_sample: Callable[[Sample], None] | None = None,
        **fields: Unpack[BeamFields],
    ) -> Result:
        """Search for the likeliest continuations of each prompt.

        Args:
            prompts, params, on_sample, fields: As for :func:`prefixkit.beam_search`.

        Raises:
            SessionBusy, MemoryReleased, KVBudgetTooSmall, ValueError, TypeError: as :meth:`generate`.
        """
        with self._called() as facts:
            requests = requests_for(BeamParams, facts, self.tokenizer, prompts, params, fields)
            return self._run(facts, requests, True, on_sample)

    def run(
        self,
        requests: Iterable[Request],
        *,
        return_samples: bool = True,
        on_sample: Callable[[Sample], None] | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> Result:
        """Run requests, samples and beam searches in one batch over one tree: what the other calls are made of.

        Occurrences of requests are taken as they are: equal prompts with equal seeds need different ones, or their
        samples are equal.

        Args:
            requests: Each with parameters of its own.
            return_samples, on_sample, on_token, on_step: As for :func:`prefixkit.generate`.

        Raises:
            SessionBusy, MemoryReleased, KVBudgetTooSmall, ValueError, TypeError: as :meth:`generate`.
        """
        with self._called() as facts:
            own = checked_requests(facts, self.tokenizer, requests)
            return self._run(facts, own, return_samples, on_sample, on_token, on_step)

    def prompt(self, prompt: Prompt, seed: int = 0) -> SearchNode:
        """The first node of a search: a prompt that is forked, stepped and scored; nothing is computed yet.

        It is a string, a list of token ids, or a list of chat messages, as :func:`prefixkit.generate` takes them, and
        its tokens are sampled by ``seed``.

        Raises:
            ValueError, TypeError: as :meth:`generate`.
        """
        (request,) = prompt_requests(patched_facts(self.model), self.tokenizer, [prompt])
        return SearchNode(self, request.tokens, as_seed(seed))

    def step(
        self,
        nodes: SearchNode | Iterable[SearchNode],
        params: SamplingParams | BeamParams | Sequence[SamplingParams | BeamParams] | None = None,
        *,
        until: Until | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[SearchNode]:
        """Let search nodes go on, all in one batch: each gets the tokens that are sampled after it, or its best beam's.

        A node's tokens depend on its own tokens and seed, not on the nodes beside it.  Greedy, sampled and
        beam-searched nodes may be mixed.  A call that raises changes no node.

        Args:
            nodes: Search nodes of this session, each once.
            params: How to go on: one for all nodes, or one for each; ``n`` has to be 1, and the seed is the node's.
            until: A string, or several, or functions as in ``SamplingParams.stop``, that end the step of a node that
                samples, not the node: what ends it stays among the node's tokens, and in its text.  They are looked for
                in the text of this step.  ``SamplingParams.stop`` does the same for single nodes.
            fields: Fields of the parameters, in place of those of ``params``.

        Returns:
            The nodes.  One whose ``BeamParams`` return several sequences stays as it was, and children of it stand in
            its place, best first.

        Raises:
            NodeReleased, NodeFinished, ForeignNode: a node cannot go on.
            SessionBusy, MemoryReleased, KVBudgetTooSmall, ValueError, TypeError: as :meth:`generate`.
        """
        with self._called() as facts:
            own = check_nodes(self, [nodes] if isinstance(nodes, SearchNode) else nodes)
            requests = step_requests(facts, self.tokenizer, own, params, until, fields)
            with in_step(own):
                result = self._run(facts, requests, True)
            return append_samples(own, requests, result)

    def values(self, prompts: Any, head: Head, *, at: Any = "last") -> Any:
        """What a head makes of the model's hidden states: a reward or value head, or a process reward model's.

        The model may be one with another head than a language model's: ``AutoModelForTokenClassification`` with
        ``head=model.score``, for example.

        Tokens that prompts share are computed once, and those that the session has seen are not computed again, but
        for the ones that values are wanted of.

        Args:
            prompts: One prompt, which may be a :class:`SearchNode`, or a list of them.
            head: From ``[tokens, hidden_size]`` last hidden states, which the language-model head would take, in the
                dtype and on the device of the model, to a tensor ``[tokens, ...]``: a ``torch.nn.Linear``, for example.
                It is called once for each step, without gradients.
            at: After which tokens: ``"last"``, ``"all"``, or a list of positions, from the end where negative; for a
                list of prompts a list of such lists.

        Returns:
            For the one prompt a tensor ``[positions, ...]`` on the CPU; for a list of prompts a list of them.

        Raises:
            SessionBusy, MemoryReleased, ValueError, TypeError: as :meth:`generate`; or ``at`` is out of range, or the
                head gives something else.
            KVBudgetTooSmall: a prompt does not fit the pool; nothing was computed.
            UnsupportedModel: the model below its language-model head gives no last hidden states.
        """
        with self._called() as facts:
            given, one = with_tokens(self, "prompts", prompts)
            marked = marked_tokens(facts, self.tokenizer, given, at, one)
            with self._engine(facts, [text.tokens for text in marked], marked) as engine:
                self.report = Report()
                found = engine.values(marked, head, self.report)
            return found[0] if one else found

    def score(self, prompts: Any, continuations: Any) -> list[Any]:
        """How likely given continuations are; tokens that prompts and continuations share are computed once.

        See :func:`prefixkit.score`; a prompt may be a :class:`SearchNode`.  Tokens whose logits are wanted run again
        where the session has their KV.

        Raises:
            SessionBusy, MemoryReleased: as :meth:`generate`.
            KVBudgetTooSmall: a prompt with one of its continuations does not fit the pool; nothing was computed.
            ValueError, TypeError: as :func:`prefixkit.score`.
        """
        with self._called() as facts:
            given, one = with_tokens(self, "prompts", prompts)
            asked = scored_tokens(facts, self.tokenizer, given, continuations, one)
            with self._engine(facts, *asked) as engine:
                self.report = Report()
                scores = engine.score(*asked, facts.vocab_size, self.report)
            return scores[0] if one else scores

    def save(self, path: str | Path, prefixes: Prompt | SearchNode | Iterable[Prompt | SearchNode]) -> int:
        """Write the KV of prompts to a file, for :meth:`load` of another session or process.

        What the session has no KV of is computed first.  The file is written beside its place and renamed: an
        interrupted write leaves an earlier file as it was.  Under tensor parallelism each process has a file of the KV
        of its heads: that of process 1 of 2 is ``NAME-1of2.safetensors``.

        Args:
            path: The file; its name should end in ``.safetensors``.
            prefixes: One prompt or search node of this session, or a list of them.

        Returns:
            How many tokens it holds, each shared one counted once.

        Raises:
            SessionBusy, MemoryReleased, ValueError, TypeError: as :meth:`generate`; nothing was written.
            UnsupportedVariant: the model applies a variant under which tokens see later ones.
            KVBudgetTooSmall: the pool does not hold all of them at once; nothing was written.
            OSError: the file cannot be written; where it is a folder, or in one that does not exist, nothing was
                computed.
        """
        with self._called() as facts:
            _check_causal(facts)
            facts.check_lm_head()
            check_place(path := self._own(path))
            own, _ = with_tokens(self, "prefixes", prefixes)
            if isinstance(own, list) and not own:
                raise ValueError("prefixes is empty; pass at least one prompt or search node")
            requests, pins = prompt_requests(facts, self.tokenizer, own), list[TreeSequence]()
            with self._engine(facts, [request.tokens for request in requests], elsewhere=False) as engine:
                store = engine.store
                try:
                    for request in requests:
                        pins.append(self._compute(facts, engine, request))
                    return save_prefixes(store, path, pins, kv_origin(facts))
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
            UnsupportedVariant: as :meth:`save`.
            PrefixFileError: it is no prefix file, it is torn, or its model, dtype or layout is another; the message
                says which.
            KVBudgetTooSmall: the pool does not hold it.
            OSError: it cannot be read.
        """
        with self._called() as facts:
            _check_causal(facts)
            path = self._own(path)
            with self._engine(facts, elsewhere=False) as engine:
                return load_prefixes(engine.store, path, kv_origin(facts), facts.vocab_size)

    def _own(self, path: str | Path) -> Path:
        """The file of this process."""
        whole, rank, of = as_path(path), self._stores.agreement.rank, self._stores.agreement.processes
        return whole if of == 1 else whole.with_stem(f"{whole.stem}-{rank}of{of}")


def _check_causal(facts: ModelFacts) -> None:
    """Raise UnsupportedVariant where a prefix's KV may depend on what comes after it."""
    if facts.looks_ahead:
        names = ", ".join(mask.variant.name for mask in facts.looks_ahead)
        raise UnsupportedVariant(
            f"prefixes cannot be saved or loaded under {names}: tokens see later ones, so that a text's KV is that of "
            "no other"
        )
