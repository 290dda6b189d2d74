"""One sample in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.request import FinishReason, Sample, TokenEvent
from prefixkit.engine.scheduler import RequestState
from prefixkit.engine.stop import StopChecker
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import sample_key
from prefixkit.tree.radix import Sequence as TreeSequence


@dataclass(eq=False)
class SampleRun:
    """A sample that is being generated.

    ``key`` seeds its private random stream.
    """

    state: RequestState
    index: int
    key: np.uint64
    sequence: TreeSequence
    params: SamplingParams
    stop: StopChecker
    top: ClassVar[int] = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        state: RequestState,
        index: int,
        sequence: TreeSequence,
        decode: Callable[[list[int]], str] | None,
        special_tokens: Mapping[int, str],
    ) -> SampleRun:
        """Start sample ``index`` of a prompt whose first logits are known."""
        params = state.request.params
        assert isinstance(params, SamplingParams)
        key = sample_key(params.seed, index, state.request.tokens, state.request.occurrence)
        stop = StopChecker(params.stop_token_ids or (), params.stop, decode, special_tokens)
        return cls(state, index, key, sequence, params, stop)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still join the tree: the last one sampled never does."""
        return self.params.max_new_tokens - 1 - len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def by_token(self) -> bool:
        """Whether tokens are looked at one by one: stop strings are looked for as they come."""
        return bool(self.params.stop)

    @property
    def unpipelined(self) -> str | None:
        """Why its next step cannot start before the host has seen its last token; None if it can."""
        return None

    def history(self) -> NDArray[np.int32]:
        """What the repetition penalty looks at: the prompt's tokens and those sampled."""
        if self.params.repetition_penalty == 1.0:
            return self.state.request.tokens
        return np.concatenate([self.state.request.tokens, np.array(self.tokens, dtype=np.int32)])

    def accept(self, token: int, logprob: float, on_token: Callable[[TokenEvent], None] | None) -> Sample | None:
        """Take a sampled token; returns the sample if this ended it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        stopped = self.stop.push(token)
        reason: FinishReason | None = None
        if stopped or len(self.tokens) == self.params.max_new_tokens:
            reason = "stop" if stopped else "length"
        if on_token is not None:
            text = self.stop.delta() + (self.stop.rest() if reason == "length" else "")
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
