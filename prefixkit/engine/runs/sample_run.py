"""One sample in flight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.call import Call
from prefixkit.engine.request import FinishReason, Sample, TokenEvent, token_count
from prefixkit.engine.request_state import RequestState
from prefixkit.engine.runs.grammar_masks import GrammarPlace
from prefixkit.engine.runs.run_protocol import Floats, RowSampling
from prefixkit.engine.runs.stop import StopChecker
from prefixkit.engine.runs.stop_filter import StopFilter
from prefixkit.kv.store import KVStore
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import sample_key
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.radix import Sequence as TreeSequence

if TYPE_CHECKING:
    from prefixkit.sampling.params import LogitsProcessor


@dataclass(eq=False, slots=True)
class SampleRun:
    """A sample that is being generated (see ``StreamingRun``).

    Attributes:
        index: The sample's index among those of its prompt.
        key: The key of its random stream.
        params: Its sampling parameters.
        stop: Finds the stop token or stop string that ends it.
        processor: Changes its logits before sampling; None: the logits stay as they are.
        grammar: Its grammar state; None without a grammar.
        stop_filter: Finds steps in which it may have met a stop string; None: with stop strings, each token is checked.
        stop_state: The filter's state for the sample.
        tokens: Tokens sampled so far.
    """

    streams: ClassVar[bool] = True

    state: RequestState
    sequences: list[TreeSequence]
    index: int
    key: np.uint64
    params: SamplingParams
    stop: StopChecker
    processor: LogitsProcessor | None = None
    grammar: GrammarPlace | None = None
    stop_filter: StopFilter | None = None
    stop_state: int = 0
    tokens: list[int] = field(default_factory=list)
    recomputing: bool = False
    _likely: list[Floats] = field(default_factory=list)  # parts of the log-probabilities of the tokens, and masses
    _sampled: NDArray[np.int32] | None = None  # all tokens, once it has ended
    _accepted: int = 0  # tokens that `stop` has seen
    _ran_out: bool = False  # no token could be sampled after its last one, which has then run

    @classmethod
    def start(cls, state: RequestState, tree: PrefixTree, call: Call) -> SampleRun:
        request, index = state.request, state.request.sample_indices[state.started]
        params = cast(SamplingParams, request.params)
        key = sample_key(params.seed, index, request.tokens, request.occurrence)
        detokenizer, strings = call.detokenizer, params.stop_strings
        special = detokenizer.special_in(strings)
        text = bool(params.stop_functions)
        stop = StopChecker(params.stop_token_ids or (), strings, detokenizer.decode, special, text=text)
        stop_filter = None if text or not strings else detokenizer.stop_filter(strings)
        processor = None
        if params.logits_processors is not None and not callable(processor := params.logits_processors()):
            raise TypeError(
                f"logits_processors must make a function of token ids and logits, it made {type(processor).__name__}; "
                "several go into one as transformers' LogitsProcessorList"
            )
        grammar = None
        if params.grammar is not None:
            assert request.matcher is not None, "a session compiles the grammars of its requests"
            grammar = GrammarPlace(request.matcher.fork(), params.stop_token_ids or ())
        return cls(state, tree.fork(state.sequence), index, key, params, stop, processor, grammar, stop_filter)

    @property
    def name(self) -> str:
        return f"sample {self.index}"

    @property
    def tokens_left(self) -> int:
        return self.params.max_new_tokens - 1 - len(self.tokens)

    @property
    def token_lists(self) -> list[list[int]]:
        return [self.tokens]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.params.stop_token_ids or ()

    @property
    def by_token(self) -> bool:
        """Whether tokens are accepted one by one: stop functions, and strings without a filter, check each token."""
        return bool(self.params.stop) and self.stop_filter is None

    @property
    def unpipelined(self) -> str | None:
        if self.processor is not None:
            return "logits processors"
        return "stop functions" if self.params.stop_functions else None

    @property
    def done(self) -> bool:
        return self.sequences[0].tree is None

    def row_sampling(self) -> RowSampling:
        process = None if self.processor is None else self.processed
        if self.grammar is not None:
            self.grammar.follow(self.tokens)
        return RowSampling(self.params, self.key, len(self.tokens), self.history(), 0, process, self.grammar)

    def lookahead_pages(self, tree: PrefixTree, tokens: int) -> int:
        node = self.sequences[0].node
        if node.reserved * tree.page_size > tokens and node.grows_in_place:
            return 0
        more = min(self.params.max_new_tokens - 1 - len(self.tokens), tokens) + self.recomputing
        return tree.pages_to_extend(self.sequences[0], more)

    def pages_to_resume(self, page_size: int, tokens: int) -> int:
        held = len(self.tokens) - 1
        return pages_for(held + 1 + min(self.tokens_left, tokens), page_size) - pages_for(held, page_size)

    def resume(self, sequences: list[TreeSequence]) -> None:
        self.sequences, self.recomputing = sequences, True

    def processed(self, logits: Tensor) -> Tensor:
        """``[vocab]`` logits, changed by the sample's processor.

        Raises:
            TypeError, ValueError: the processor returned no tensor, or one of another shape.
        """
        assert self.processor is not None, "asked before"
        ids = torch.from_numpy(self.history().astype(np.int64)).to(logits.device)
        found = self.processor(ids[None], logits[None])
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"a logits processor must return the logits, got {type(found).__name__}")
        if found.shape != (1, len(logits)):
            raise ValueError(
                f"a logits processor must return logits of shape [1, {len(logits)}], got {list(found.shape)}"
            )
        return found[0]

    def history(self) -> NDArray[np.int32]:
        """The tokens that penalties and logits processors read: the prompt's and the sampled ones."""
        if self.params.repetition_penalty == 1.0 and self.processor is None:
            return self.state.request.tokens
        return np.concatenate([self.state.request.tokens, np.array(self.tokens, dtype=np.int32)])

    def hold(self, tokens: list[int], likely: Floats, stop_state: int) -> None:
        self._append(tokens, likely)
        self.stop_state = stop_state

    def accept(self, tokens: list[int], likely: Floats, on_token: Callable[[TokenEvent], None] | None) -> Sample | None:
        self._append(tokens, likely)
        stopped = self.stop.push(self.tokens[self._accepted :])
        self._accepted = len(self.tokens)
        if not stopped and (functions := self.params.stop_functions):
            stopped = any(function(self.tokens.copy(), self.stop.so_far) for function in functions)
        reason: FinishReason | None = None
        if stopped or len(self.tokens) == self.params.max_new_tokens:
            reason = "stop" if stopped else "length"
        if on_token is not None:
            text = self.stop.delta() + ("" if reason is None else self.stop.flush())
            index = self.state.request.prompt_index
            on_token(TokenEvent(index, self.index, tokens[-1], float(likely[-1, 0]), text, reason))
        if reason is not None:
            return self._sample(reason)
        self.stop_filter = None  # the filter may have found a stop string that was none
        return None

    def run_out(self, tokens: list[int], likely: Floats, on_token: Callable[[TokenEvent], None] | None) -> Sample:
        assert self.grammar is not None or self.processor is not None, "else the logits are broken"
        self._append(tokens, likely[: len(tokens)])
        if fresh := self.tokens[self._accepted :]:
            self.stop.push(fresh)
        self._ran_out = True
        reason: FinishReason = "stop" if self.grammar is not None and self.grammar.may_end else "dead_end"
        if on_token is not None:
            index, text = self.state.request.prompt_index, self.stop.delta() + self.stop.flush()
            on_token(TokenEvent(index, self.index, -1, -math.inf, text, reason))
        return self._sample(reason)

    def _append(self, tokens: list[int], likely: Floats) -> None:
        self.tokens += tokens
        columns = 1 + self.params.drawn  # a batch has masses if one of its samples wants them; the next may have none
        self._likely.append(likely[:, :columns].copy())  # a view would keep those of all runs

    def leave(self, store: KVStore, samples: list[Sample], retain: bool) -> None:
        """Remove its sequence from the tree; with ``retain``, the KV of tokens that have run stays in the cache."""
        (sequence,), sampled = self.sequences, self._sampled
        if not retain:
            return store.tree.release(sequence)
        assert sampled is not None, "it has ended"
        held = sequence.length - len(self.state.request.tokens)
        own, states, state = sequence.node, store.tree.states, -1
        if held and states is not None:  # the row's state is that after its last token, or after later ones
            state, own.state = -1 if states.ahead else own.state, -1
        more = sampled[held : len(sampled) - (not self._ran_out)]
        if len(more):
            store.tree.extend(sequence, more)
        store.tree.mark_all_computed(sequence.node)
        if held and states is not None:
            sequence.node.state = state
        store.retain(sequence)

    def tokens_of_plain_batch(self, samples: list[Sample]) -> int:
        return len(self.state.request.tokens) + token_count(samples[0]) - (not self._ran_out)

    def _sample(self, reason: FinishReason) -> Sample:
        """Make the finished sample, and drop the run's own lists: an ended run may stay in a batch for long."""
        tokens: Any = np.array(self.tokens, np.int32)  # a sample makes lists of its arrays
        likely: Any = np.concatenate(self._likely)
        masses = None
        if self.params.logprobs == "sampled":
            masses = likely[:, 1] if self.params.drawn else np.ones_like(likely[:, 0])
        sample = Sample(
            prompt_index=self.state.request.prompt_index,
            index=self.index,
            tokens=tokens,
            logprobs=likely[:, 0],
            text=self.stop.text(),
            finish_reason=reason,
            masses=masses,
        )
        self._sampled, self.tokens, self._likely = tokens, [], []
        del self.stop
        return sample
