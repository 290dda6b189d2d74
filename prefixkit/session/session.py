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
    """Many calls on one model, which share a KV pool, the prefix cache, CUDA graphs and compiled layers.

    A session runs one call at a time: a session that is busy raises :class:`SessionBusy`.  Two sessions may run in two
    threads, on one model or on two; a call that finds the shared store in use runs in another store.  After a call that
    raised, the session can be used.

    The KV of prompts and samples stays in the pool when a call ends, until its pages are needed: for a prompt that
    shares a prefix with an earlier one, or continues a sample, only new tokens are computed.  KV of other weights is
    never used: a call detects changed weights and another adapter (docs/howto/memory.md says how).  If steps cannot run
    in CUDA graphs, for example for lack of memory, a call runs them without graphs, and one log line says so.

    Args:
        model, tokenizer, page_size, prefill_chunk: As for :func:`prefixkit.generate`.
        kv_budget: Memory for KV in a store of the session's own, in bytes or as a size such as ``"40GiB"``.  None: the
            session shares a store of half of the free memory with the model's own ``generate()`` and with other such
            sessions.  The store is made at once and does not grow; requests that do not fit at once wait, or are
            preempted.
        compiled: On a GPU, run layers through torch.compile.  Compiling takes some seconds once for each model, and
            less if torch finds the result in its cache on disk; later sessions on the model use the same compiled
            layers.  The first call that samples more than a few tokens compiles them; later calls, scores and values
            use them too.
        most_running: Most samples, or beam searches, that run at once; others wait.
        memory: The policy of eviction and preemption; None: ``MemoryPolicy()``.

    Raises:
        NotPatched: the model is not patched.
        ValueError, TypeError: a parameter is out of range or of another type, or the budget is less than one page.
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
            MemoryReleased: the session has ended or has released its memory.
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
        """Sample as :meth:`generate` does, and yield each sample when it finishes.

        Everything is checked before this returns.  The session is busy from the first ``next`` until the iterator ends
        or is closed, which also happens when the last reference to it is dropped; unfinished samples are then dropped.
        If the session is busy or has no memory at the first ``next``, that raises SessionBusy or MemoryReleased, and a
        later ``next`` tries again.  After an error or the session's end, ``next`` raises ValueError.

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
                yield  # the call has started
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
        """Run requests, samples and beam searches in one batch over one tree; the other calls use this one.

        Requests with equal prompts, seeds and ``occurrence`` get equal samples.

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
        """Make the first node of a search, a prompt that can be forked, stepped and scored; nothing is computed yet.

        The prompt is a string, a list of token ids, or a list of chat messages, as for :func:`prefixkit.generate`;
        ``seed`` is the seed of the node's samples.

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
        """Continue search nodes in one batch, each by sampled tokens or by those of its best beam.

        What a node samples depends on its own tokens and seed, not on the other nodes of the step.  Greedy, sampled and
        beam-searched nodes may be mixed.  A call that raises changes no node.

        Args:
            nodes: Search nodes of this session, each once.
            params: Parameters: one for all nodes, or one for each; ``n`` has to be 1, and the seed is the node's.
            until: A string, or several, or functions as in ``SamplingParams.stop``, that end the step of a sampling
                node, but not the node: the string or tokens that end the step stay among the node's tokens, and in its
                text.  Strings are searched for in the text of this step.  ``SamplingParams.stop`` does the same for
                single nodes.
            fields: Fields of the parameters, in place of those of ``params``.

        Returns:
            The nodes.  A node whose ``BeamParams`` return several sequences stays as it was, and its new children are
            returned in its place, best first.

        Raises:
            NodeReleased, NodeFinished, ForeignNode: a node cannot be stepped.
            SessionBusy, MemoryReleased, KVBudgetTooSmall, ValueError, TypeError: as :meth:`generate`.
        """
        with self._called() as facts:
            own = check_nodes(self, [nodes] if isinstance(nodes, SearchNode) else nodes)
            requests = step_requests(facts, self.tokenizer, own, params, until, fields)
            with in_step(own):
                result = self._run(facts, requests, True)
            return append_samples(own, requests, result)

    def values(self, prompts: Any, head: Head, *, at: Any = "last") -> Any:
        """Apply a head to the model's hidden states, such as that of a reward, value or process reward model.

        The model need not have a language-model head: it may be an ``AutoModelForTokenClassification`` with
        ``head=model.score``, for example.

        Tokens that prompts share are computed once.  Tokens whose KV the session has are computed again only if their
        values are wanted.

        Args:
            prompts: One prompt, which may be a :class:`SearchNode`, or a list of them.
            head: A function, for example a ``torch.nn.Linear``, from last hidden states ``[tokens, hidden_size]``, in
                the dtype and on the device of the model, to a tensor ``[tokens, ...]``.  It is called once for each
                step, without gradients.
            at: The positions whose values are wanted: ``"last"``, ``"all"``, or a list of positions, negative ones
                counted from the end; for a list of prompts a list of such lists.

        Returns:
            For one prompt a tensor ``[positions, ...]`` on the CPU; for a list of prompts a list of them.

        Raises:
            SessionBusy, MemoryReleased, ValueError, TypeError: as :meth:`generate`; or ``at`` is out of range, or the
                head returns something else.
            KVBudgetTooSmall: a prompt does not fit the pool; nothing was computed.
            UnsupportedModel: the model below its language-model head returns no last hidden states.
        """
        with self._called() as facts:
            given, one = with_tokens(self, "prompts", prompts)
            marked = marked_tokens(facts, self.tokenizer, given, at, one)
            with self._engine(facts, [text.tokens for text in marked], marked) as engine:
                self.report = Report()
                found = engine.values(marked, head, self.report)
            return found[0] if one else found

    def score(self, prompts: Any, continuations: Any) -> list[Any]:
        """Score given continuations; tokens that prompts and continuations share are computed once.

        See :func:`prefixkit.score`; a prompt may be a :class:`SearchNode`.  Tokens whose logits are needed run again
        even where the session has their KV.

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

        Missing KV is computed first.  The file is written under another name and renamed: an interrupted write leaves
        an earlier file as it was.  Under tensor parallelism each process writes a file of its heads, process 1 of 2
        ``NAME-1of2.safetensors``.

        Args:
            path: The file; its name should end in ``.safetensors``.
            prefixes: One prompt or search node of this session, or a list of them.

        Returns:
            The number of tokens in the file; a shared token counts once.

        Raises:
            SessionBusy, MemoryReleased, ValueError, TypeError: as :meth:`generate`; nothing was written.
            UnsupportedVariant: the model applies a variant under which tokens see later ones.
            KVBudgetTooSmall: the pool does not hold all prefixes at once; nothing was written.
            OSError: the file cannot be written; if the path is a folder, or in a folder that does not exist, nothing
                was computed.
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
                        if pin.tree is store.tree:  # after an interrupt the store has another tree
                            store.retain(pin)

    def load(self, path: str | Path) -> int:
        """Read prefixes that :meth:`save` wrote into the prefix cache, as if their prompts had been computed here.

        Args:
            path: The file.  It is mapped into memory; KV that is already in the prefix cache is not read.

        Returns:
            The number of tokens that were read.

        Raises:
            SessionBusy, MemoryReleased: as :meth:`generate`.
            UnsupportedVariant: as :meth:`save`.
            PrefixFileError: the file is not a prefix file, is incomplete, or is of another model, dtype or layout; the
                message says which.
            KVBudgetTooSmall: the pool does not hold the prefixes.
            OSError: the file cannot be read.
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
    """Raise UnsupportedVariant if a prefix's KV may depend on later tokens."""
    if facts.looks_ahead:
        names = ", ".join(mask.variant.name for mask in facts.looks_ahead)
        raise UnsupportedVariant(
            f"prefixes cannot be saved or loaded under {names}: tokens see later ones, so that a text's KV is that of "
            "no other"
        )
