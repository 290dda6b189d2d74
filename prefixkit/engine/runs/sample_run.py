"""One sample in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.request import FinishReason, Sample, TokenEvent
from prefixkit.engine.runs.detokenizer import Detokenizer
from prefixkit.engine.runs.stop import StopChecker
from prefixkit.engine.scheduler import RequestState
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import sample_key
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.radix import Sequence as TreeSequence

if TYPE_CHECKING:
    from prefixkit.sampling.params import LogitsProcessor


@dataclass(eq=False)
class SampleRun:
    """A sample that is being generated.

    ``key`` seeds its private random stream.  One that ``restores`` was preempted: its last token joins its sequence
    once those before it have KV again.
    """

    state: RequestState
    index: int
    key: np.uint64
    sequence: TreeSequence
    params: SamplingParams
    stop: StopChecker
    processor: LogitsProcessor | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    restores: bool = False

    @classmethod
    def begin(
        cls,
        state: RequestState,
        index: int,
        tree: PrefixTree,
        detokenizer: Detokenizer,
    ) -> SampleRun:
        """Start sample ``index`` of a prompt whose first logits are known; where that fails, the tree is unchanged."""
        params = state.request.params
        assert isinstance(params, SamplingParams)
        key = sample_key(params.seed, index, state.request.tokens, state.request.occurrence)
        text = bool(params.stop_functions)
        decode, special = detokenizer.decode, detokenizer.special_tokens
        stop = StopChecker(params.stop_token_ids or (), params.stop_strings, decode, special, text=text)
        processor = None
        if params.logits_processors is not None and not callable(processor := params.logits_processors()):
            raise TypeError(
                f"logits_processors must make a function of token ids and logits, it made {type(processor).__name__}; "
                "several go into one as transformers' LogitsProcessorList"
            )
        return cls(state, index, key, tree.fork(state.sequence)[0], params, stop, processor)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still join the tree: the last one sampled never does."""
        return self.params.max_new_tokens - 1 - len(self.tokens)

    @property
    def sequences(self) -> list[TreeSequence]:
        """Its sequence in the tree."""
        return [self.sequence]

    @property
    def token_lists(self) -> list[list[int]]:
        """The tokens sampled so far, of its sequence."""
        return [self.tokens]

    def resume(self, sequences: list[TreeSequence]) -> None:
        """Go on with a sequence of the prompt and all tokens but the last."""
        (self.sequence,), self.restores = sequences, True

    def growth(self, tree: PrefixTree, tokens: int) -> int:
        """Pages that its next tokens may take, so many if it gets as far."""
        return tree.pages_to_extend(self.sequence, min(self.tokens_left, tokens) + self.restores)

    def processed(self, logits: Tensor) -> Tensor:
        """``[vocab]`` logits as the sample's processor gives them.

        Raises:
            TypeError, ValueError: it gave no tensor, or one of another shape.
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

    @property
    def by_token(self) -> bool:
        """Whether tokens are looked at one by one: stop strings and functions are asked as they come."""
        return bool(self.params.stop)

    @property
    def unpipelined(self) -> str | None:
        """Why its next step cannot start before the host has seen its last token; None if it can."""
        if self.processor is not None:
            return "logits processors"
        return "stop functions" if self.params.stop_functions else None

    def history(self) -> NDArray[np.int32]:
        """What penalties and logits processors look at: the prompt's tokens and those sampled."""
        if self.params.repetition_penalty == 1.0 and self.processor is None:
            return self.state.request.tokens
        return np.concatenate([self.state.request.tokens, np.array(self.tokens, dtype=np.int32)])

    def accept(self, token: int, logprob: float, on_token: Callable[[TokenEvent], None] | None) -> Sample | None:
        """Take a sampled token; returns the sample if this ended it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        stopped = self.stop.push(token)
        if not stopped and (functions := self.params.stop_functions):
            stopped = any(function(self.tokens.copy(), self.stop.so_far) for function in functions)
        reason: FinishReason | None = None
        if stopped or len(self.tokens) == self.params.max_new_tokens:
            reason = "stop" if stopped else "length"
        if on_token is not None:
            text = self.stop.delta() + ("" if reason is None else self.stop.rest())
            on_token(TokenEvent(self.state.request.prompt_index, self.index, token, logprob, text, reason))
        return None if reason is None else self._sample(reason)

    def accept_all(self, tokens: list[int], logprobs: list[float], ends: bool) -> Sample | None:
        """Take tokens of which none but the last can end the sample; returns the sample if ``ends``."""
        self.tokens += tokens
        self.logprobs += logprobs
        stopped = self.stop.push_all(tokens)
        return self._sample("stop" if stopped else "length") if ends else None

    def _sample(self, reason: FinishReason) -> Sample:
        """The finished sample; from now on it alone holds the tokens, as arrays: a run may stay in a batch for long."""
        sample = Sample(
            prompt_index=self.state.request.prompt_index,
            index=self.index,
            tokens=self.tokens,
            logprobs=self.logprobs,
            text=self.stop.text(),
            finish_reason=reason,
        )
        self.tokens, self.logprobs, self.stop = [], [], StopChecker((), (), None)
        return sample
