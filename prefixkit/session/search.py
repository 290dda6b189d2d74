"""Search over a session: nodes are forked, stepped, scored and dropped; tokens that they share are computed once."""

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
from prefixkit.tree.arrays import Ints

NodeReason = Literal["stop", "until", "length", "dead_end"]


class NodeReleased(ValueError):
    """A search node was used after its release."""


class NodeFinished(ValueError):
    """A search node was stepped after a stop token."""


class ForeignNode(ValueError):
    """A search node was passed to another session than its own."""


@dataclass(eq=False, repr=False, slots=True)
class _Run:
    """Tokens appended to a node at once; all nodes that have them share this run and the runs before it.

    Attributes:
        before: The run before; None for the prompt.
        tokens: ``[length]`` token ids.
        logprobs: ``[length]`` float32, one for each token; None for tokens that were not sampled, until first read.
        end: Number of tokens up to its end, including the prompt's.
    """

    before: _Run | None
    tokens: Ints
    logprobs: NDArray[np.float32] | None
    end: int

    def all(self) -> list[_Run]:
        """The runs from the prompt to this one."""
        runs, run = [self], self
        while run.before is not None:
            runs.append(run := run.before)
        return runs[::-1]

    def ids(self) -> Ints:
        """``[end]`` token ids from the first of the prompt to the last of this run."""
        return np.concatenate([run.tokens for run in self.all()])


class SearchNode:
    """A prompt and the tokens after it, as a handle of a search; :meth:`prefixkit.Session.prompt` makes the first node.

    A node holds tokens; their KV is in the session's prefix cache.  Evicted KV is computed again when the node is
    stepped, so memory pressure slows a search down and never breaks it, and a node outlives ``release_memory()``.
    Nodes share the lists of their common tokens, so the time of a fork does not depend on the length.

    Attributes:
        session: The session of the node.
        seed: The seed and the node's tokens alone determine the random numbers of the next tokens: nodes of equal
            tokens and seeds sample the same.
        parent: The node from which it was forked; None for the first node of a prompt.
        finish_reason: Why its last step ended: ``"stop"`` by a stop token, after which it takes no more steps,
            ``"until"`` by a string or function of ``until`` or ``SamplingParams.stop``, or because a grammar without
            stop tokens is finished, ``"length"`` after ``max_new_tokens``, ``"dead_end"`` as for a sample.  A fork
            starts with its parent's reason; None before the first step, and after :meth:`extend`.
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
        """Number of tokens, including the prompt's."""
        return self._held().end

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """Token ids, including the prompt's."""
        return list(self._held().ids().tolist())

    @property
    def new_tokens(self) -> list[int]:
        """Token ids after the prompt."""
        return [token for run in self._held().all()[1:] for token in run.tokens.tolist()]

    @property
    def text(self) -> str:
        """The text of the tokens after the prompt, without special tokens; empty without a tokenizer."""
        tokens, tokenizer = self.new_tokens, self.session.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))

    @property
    def logprobs(self) -> list[float]:
        """The model's own log-probability of each token after the prompt, before any penalty, temperature or filter.

        For tokens given to :meth:`extend`, ``session.score`` computes them when they are first read.
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
            count: Number of nodes, 1 to 2**31 - 1.
            seeds: One for each, 0 to 2**64 - 1.  None: the seeds are derived from the node's own seed and the number of
                its earlier forks, so that all differ, and are the same in each run of the program.

        Raises:
            NodeReleased: the node has been released.
            ValueError, TypeError: ``count`` or a seed is out of range or no integer, or the seeds are not ``count``.
        """
        last, number = self._held(), as_integer("count", count, 1, "fork 1 node to 2**31 - 1", 2**31 - 1)
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
        """Append given tokens, or those of a string, without special tokens; a finished node can then be stepped again.

        Returns the node.

        Raises:
            NodeReleased: the node has been released.
            ValueError, TypeError: no token, a token outside the vocabulary, or text without a tokenizer; or a step of
                the node is under way, and one of its callbacks or another thread calls this.
        """
        self._check_idle("extend")
        own = continuation_tokens(self.session.tokenizer, tokens, text_config(self.session.model).vocab_size)
        self.append(own, None, None)
        return self

    def release(self) -> None:
        """Drop the node's tokens; other nodes keep theirs, and the node's KV may be evicted.

        Raises:
            NodeReleased: the node was released before.
            ValueError: a step of the node is under way.
        """
        self._check_idle("release")
        self._last, self._places = None, {}

    def ids(self) -> Ints:
        """``[len(node)]`` token ids, including the prompt's; the session owns them, and callers must not write them."""
        return self._held().ids()

    def place_in(self, grammar: Grammar, begin: Matcher) -> Matcher:
        """The matcher at the node's end, if its steps have followed this grammar; else ``begin``: it starts here.

        Raises:
            ValueError: tokens appended since the last such step do not match.
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
        """Remember ``matcher``, the state at the node's end of a grammar that a step follows from here."""
        self._places[grammar] = self._held().end, matcher

    def append(
        self,
        tokens: Ints,
        logprobs: NDArray[np.float32] | None,
        reason: NodeReason | None,
    ) -> None:
        """Append tokens that a step of the session has sampled, or that :meth:`extend` was given.

        Args:
            tokens: ``[count]`` int32 token ids.
            logprobs: ``[count]`` float32, the natural logarithm of each one's probability; None: computed when first
                read.
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
    """Nodes that a session may use; raises TypeError, ForeignNode or NodeReleased if it may not use one of them."""
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
    """Keep the nodes unchanged during a step, because sampled tokens continue their present tokens."""
    for node in nodes:
        node._in_step = True
    try:
        yield
    finally:
        for node in nodes:
            node._in_step = False


def with_tokens(session: object, name: str, prompts: Any) -> tuple[Any, bool]:
    """A list of prompts, with nodes replaced by their tokens, and whether a single prompt was given."""
    one = isinstance(prompts, SearchNode) or is_one_prompt(prompts)
    if isinstance(prompts, Mapping) or (hasattr(prompts, "ndim") and not one):
        return prompts, one
    given = [prompts] if one else as_list(name, prompts, "prompts or search nodes")
    check_nodes(session, [node for node in given if isinstance(node, SearchNode)])
    return [Unpadded(node.tokens) if isinstance(node, SearchNode) else node for node in given], one
