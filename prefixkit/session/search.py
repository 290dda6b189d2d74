"""Search programs over a session: nodes are forked, stepped, scored and dropped; what they share is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prefixkit.models import text_config
from prefixkit.sampling.grammar import Grammar, Matcher
from prefixkit.sampling.params import as_integer, as_list, as_seed
from prefixkit.sampling.rng import sample_key
from prefixkit.session.prompts import Unpadded
from prefixkit.session.requests import continuation_tokens, is_one_prompt

Ints = NDArray[np.int32]
NodeReason = Literal["stop", "until", "length", "dead_end"]


class NodeReleased(ValueError):
    """A search node was used after its release."""


class NodeFinished(ValueError):
    """A search node was stepped after a stop token."""


class ForeignNode(ValueError):
    """A search node was passed to another session than its own."""


@dataclass(eq=False, repr=False, slots=True)
class _Run:
    """Tokens that joined a node at once; all nodes that have them hold this one run, and those before it.

    Attributes:
        before: What came before; None for the prompt.
        tokens: ``[length]`` token ids.
        logprobs: ``[length]`` float32 of each; None where none were sampled, until they are asked for.
        end: Tokens up to its end, the prompt's included.
    """

    before: _Run | None
    tokens: Ints
    logprobs: NDArray[np.float32] | None
    end: int

    def all(self) -> list[_Run]:
        """Those from the prompt to this one."""
        runs, run = [self], self
        while run.before is not None:
            runs.append(run := run.before)
        return runs[::-1]

    def ids(self) -> Ints:
        """``[end]`` tokens from the first of the prompt to the last of this one."""
        return np.concatenate([run.tokens for run in self.all()])


class SearchNode:
    """A prompt and the tokens after it, as a handle of a search; :meth:`prefixkit.Session.prompt` makes the first node.

    A node holds tokens; their KV is in the session's prefix cache.  Evicted KV is computed again when the node is
    stepped, so memory pressure slows a search down and never breaks it, and a node outlives ``release_memory()``.
    Nodes share the lists of their common tokens: a fork takes the same time at any length.

    Attributes:
        session: The session that it belongs to.
        seed: With the tokens before them, and nothing else, the seed determines the random numbers of the next tokens:
            nodes of equal tokens and seeds sample the same.
        parent: The node that it was forked from; None for a prompt's own.
        finish_reason: Why its last step ended: ``"stop"`` by a stop token, after which it takes no more steps,
            ``"until"`` by a string or function of ``until`` or ``SamplingParams.stop``, or because a grammar without
            stop tokens is finished, ``"length"`` after ``max_new_tokens``, ``"dead_end"`` as for a sample.  A fork
            begins with its parent's reason; None before the first step, and after :meth:`extend`.
    """

    def __init__(self, session: Any, tokens: Ints, seed: int) -> None:
        self.session, self.seed = session, seed
        self.parent: SearchNode | None = None
        self.finish_reason: NodeReason | None = None
        self._last: _Run | None = _Run(None, tokens, None, len(tokens))  # None: released
        self._in_step = False
        self._children = 0
        self._places: dict[Grammar, tuple[int, Matcher]] = {}

    def __repr__(self) -> str:
        if self._last is None:
            return f"SearchNode(released, seed={self.seed})"
        return f"SearchNode({self._last.end} tokens, seed={self.seed}, finish_reason={self.finish_reason!r})"

    def __len__(self) -> int:
        """Tokens, the prompt's included."""
        return self._held().end

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """Token ids, the prompt's included."""
        return list(self._held().ids().tolist())

    @property
    def new_tokens(self) -> list[int]:
        """Token ids after the prompt."""
        return [token for run in self._held().all()[1:] for token in run.tokens.tolist()]

    @property
    def text(self) -> str:
        """The text of the tokens after the prompt, without special tokens; empty where there is no tokenizer."""
        tokens, tokenizer = self.new_tokens, self.session.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))

    @property
    def logprobs(self) -> list[float]:
        """The model's own log-probability of each token after the prompt, before any penalty, temperature or filter.

        Those of tokens that :meth:`extend` was given are computed when they are first asked for, by ``session.score``.
        """
        found: list[float] = []
        for run in self._held().all()[1:]:
            if run.logprobs is None:
                assert run.before is not None, "the prompt's are left out"
                (score,) = self.session.score(run.before.ids(), [run.tokens])
                run.logprobs = np.asarray(score.logprobs, np.float32)
            found += run.logprobs.tolist()
        return found

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._last is None

    # -- changing ------------------------------------------------------------------------------------------------------

    def fork(self, count: int, seeds: Iterable[int] | None = None) -> list[SearchNode]:
        """Make nodes with the tokens of this one, which then grow independently.  Nothing is computed or copied.

        Args:
            count: How many, at least one.
            seeds: One for each, 0 to 2**64 - 1.  None: the seeds follow from the node's own seed and the number of its
                earlier forks, so that all are different, and the same at each run of the program.

        Raises:
            NodeReleased: the node has been released.
            ValueError, TypeError: ``count`` or a seed is out of range or no integer, or the seeds are not ``count``.
        """
        last, number = self._held(), as_integer("count", count, 1, "fork at least one node")
        if seeds is None:
            own = [int(sample_key(self.seed, self._children + index, ())) for index in range(number)]
        else:
            own = [as_seed(seed) for seed in as_list("seeds", seeds, "integers")]
        if len(own) != number:
            raise ValueError(
                f"fork({number}) needs a seed for each node, got {len(own)}; pass range({number}), or none"
            )
        self._children += number
        nodes = [SearchNode(self.session, last.tokens, seed) for seed in own]
        for node in nodes:
            node.parent, node.finish_reason, node._last = self, self.finish_reason, last
            node._places = self._places.copy()
        return nodes

    def extend(self, tokens: str | Sequence[int]) -> SearchNode:
        """Append given tokens, or the tokens of a string without special ones; a node that had ended can be stepped
        again.  Returns the node.

        Raises:
            NodeReleased: the node has been released.
            ValueError, TypeError: no token, one outside the vocabulary, or text without a tokenizer; or a step of the
                node is under way, and this is one of its callbacks or another thread.
        """
        self._check_idle("extend")
        own = continuation_tokens(self.session.tokenizer, tokens, text_config(self.session.model).vocab_size)
        self.append(own, None, None)
        return self

    def release(self) -> None:
        """Drop the node's tokens; other nodes keep theirs, and the node's KV may be evicted.

        Raises:
            NodeReleased: it was released before.
            ValueError: a step of the node is under way.
        """
        self._check_idle("release")
        self._last, self._places = None, {}

    def ids(self) -> Ints:
        """``[len(node)]`` token ids, the prompt's included: the session's, to be read alone."""
        return self._held().ids()

    def place_in(self, grammar: Grammar, begin: Matcher) -> Matcher:
        """Where the node's end is in a grammar that its steps have followed; else ``begin``, for it begins here.

        Raises:
            ValueError: what was appended since does not match.
        """
        if grammar not in self._places:
            return begin
        length, before = self._places[grammar]
        matcher = before.fork()
        for token in self._held().ids()[length:].tolist():
            if not all(type(matcher).accept([matcher], [token])):
                raise ValueError(
                    f"{self!r} follows a grammar, which does not allow token {token} after its first {length} tokens; "
                    "extend it by what matches, or begin the grammar anew: session.prompt(node.tokens)"
                )
        return matcher

    def remember_place(self, grammar: Grammar, matcher: Matcher) -> None:
        """Note where the node's end is in a grammar that a step has followed from here: ``matcher`` is there."""
        self._places[grammar] = self._held().end, matcher

    def append(
        self,
        tokens: Ints,
        logprobs: NDArray[np.float32] | None,
        reason: NodeReason | None,
    ) -> None:
        """Append what a step of the session has sampled, or what :meth:`extend` was given.

        Args:
            tokens: ``[count]`` int32 token ids.
            logprobs: ``[count]`` float32, the natural logarithm of each one's probability; None: computed when asked
                for.
            reason: Why the step ended; None for given tokens.
        """
        last = self._held()
        self._last, self.finish_reason = _Run(last, tokens, logprobs, last.end + len(tokens)), reason

    def _check_idle(self, what: str) -> None:
        self._held()
        if self._in_step:
            raise ValueError(f"cannot {what} {self!r} while it is in a step; do so once session.step() has returned")

    def _held(self) -> _Run:
        if self._last is None:
            raise NodeReleased(f"{self!r} was released; fork the node that it came from, or release it later")
        return self._last


def check_nodes(session: object, nodes: Iterable[SearchNode]) -> list[SearchNode]:
    """Nodes that a session may use; TypeError, ForeignNode or NodeReleased where one is not."""
    found = as_list("nodes", nodes, "search nodes")
    for node in found:
        if not isinstance(node, SearchNode):
            raise TypeError(f"nodes must be search nodes, got {type(node).__name__}; make them by session.prompt()")
        if node.session is not session:
            raise ForeignNode(f"{node!r} belongs to another session; make one here: session.prompt(node.tokens)")
        node._held()
    return found


@contextmanager
def in_step(nodes: list[SearchNode]) -> Iterator[None]:
    """Nodes are not to change meanwhile: what is sampled follows the tokens that they have now."""
    for node in nodes:
        node._in_step = True
    try:
        yield
    finally:
        for node in nodes:
            node._in_step = False


def with_tokens(session: object, name: str, prompts: Any) -> tuple[Any, bool]:
    """A list of prompts, with tokens in the place of nodes, and whether it is of a single prompt that was given."""
    one = isinstance(prompts, SearchNode) or is_one_prompt(prompts)
    if isinstance(prompts, Mapping) or (hasattr(prompts, "ndim") and not one):
        return prompts, one
    given = [prompts] if one else as_list(name, prompts, "prompts or search nodes")
    check_nodes(session, [node for node in given if isinstance(node, SearchNode)])
    return [Unpadded(node.tokens) if isinstance(node, SearchNode) else node for node in given], one
