"""One sample in flight, and sampling the next token of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.request import FinishReason, Sample, TokenEvent
from prefixkit.engine.scheduler import RequestState
from prefixkit.engine.stop import StopChecker
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import sample_key
from prefixkit.sampling.specification import SampleRows, SamplingBatch, sample_on_host
from prefixkit.tree.radix import Sequence as TreeSequence


@dataclass(eq=False)
class SampleRun:
    """A sample that is being generated.

    ``logits`` are those after its last token: ``[vocab]``.  ``key`` seeds its private random stream.
    """

    state: RequestState
    index: int
    key: np.uint64
    sequence: TreeSequence
    params: SamplingParams
    stop: StopChecker
    logits: Tensor
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
        params, logits = state.request.params, state.first_logits
        assert isinstance(params, SamplingParams) and logits is not None
        key = sample_key(params.seed, index, state.request.tokens, state.request.occurrence)
        stop = StopChecker(params.stop_token_ids or (), params.stop, decode, special_tokens)
        return cls(state, index, key, sequence, params, stop, logits)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still join the tree: the last one sampled never does."""
        return self.params.max_new_tokens - 1 - len(self.tokens)

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

    @property
    def needs_each_token(self) -> bool:
        """Whether stop strings must be looked for as the tokens come."""
        return bool(self.params.stop)

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


def sample_next(runs: list[SampleRun], sample: SampleRows = sample_on_host) -> Iterator[tuple[SampleRun, int, float]]:
    """Sample one token for each run; the token of a run does not depend on the other runs.

    Raises:
        ValueError: logits hold NaN, +inf or no finite value.
    """
    if not runs:
        return
    tokens, logprobs = sample(torch.stack([run.logits for run in runs]), sampling_batch(runs))
    sampled = tokens.tolist()
    if min(sampled) < 0:  # before the other tokens are used
        raise broken_logits(runs[sampled.index(min(sampled))])
    yield from zip(runs, sampled, logprobs.tolist(), strict=True)


def sampling_batch(runs: list[SampleRun]) -> SamplingBatch:
    """How the next token of each run is sampled."""
    keys = np.array([run.key for run in runs], np.uint64)
    steps = np.array([len(run.tokens) for run in runs], np.int64)
    return SamplingBatch([run.params for run in runs], keys, steps, [run.history() for run in runs])


def broken_logits(run: SampleRun) -> ValueError:
    """What to raise where a device could sample no token."""
    return ValueError(
        f"the logits of sample {run.index} of prompt {run.state.request.prompt_index} hold NaN, +inf or no finite "
        "value, so no token can be sampled; look at what the model computed"
    )
