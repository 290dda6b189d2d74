"""What a user asks for and what comes back: parameters, requests, samples and streamed tokens, as frozen values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prefixkit.sampling.grammar import Matcher, shortened
from prefixkit.sampling.params import SamplingParams, as_integer, as_list, as_number, as_token_ids

FinishReason = Literal["stop", "length", "dead_end"]


@dataclass(frozen=True)
class BeamParams:
    """How to search for the likeliest continuations of one prompt.

    Attributes:
        num_beams: Number of live sequences at every step, and most finished sequences.
        num_return_sequences: How many finished sequences to return, best first; at most ``num_beams``.
        length_penalty: A finished sequence has the score ``sum of log-probabilities / length ** length_penalty``; a
            penalty above 0 favours long sequences, one below 0 short ones.  Length counts generated tokens, the stop
            token included.
        early_stopping: ``True`` stops once ``num_beams`` sequences are finished.  ``False`` stops once the best live
            beam, scored at its present length, is no better than the worst finished sequence.  ``"never"`` scores the
            live beam at the length most favourable to it, so that no better sequence can be missed.
        max_new_tokens: Most tokens to generate.
        stop_token_ids: Tokens that finish a sequence; None: the model's end-of-sequence tokens.

    Raises:
        ValueError, TypeError: a field is out of range, or of another type.
    """

    num_beams: int
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None

    forks = True  # whether a run forks its sequences
    runs = 1  # runs of one prompt: the search

    @property
    def sequences_per_run(self) -> int:
        """Most sequences that a search grows at once."""
        return self.num_beams

    def __post_init__(self) -> None:
        for name, remedy in (
            ("num_beams", "keep at least one beam"),
            ("num_return_sequences", "ask for at least one sequence"),
            ("max_new_tokens", "ask for at least one token"),
        ):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), 1, remedy))
        object.__setattr__(self, "length_penalty", as_number("length_penalty", self.length_penalty))
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", as_token_ids("stop_token_ids", self.stop_token_ids))
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences must be at most num_beams, got {self.num_return_sequences} of "
                f"{self.num_beams} beams; raise num_beams or return fewer"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")
        # Scores are float32, so their divisor must be representable in float32, and not 0.
        if abs(self.length_penalty) * math.log(self.max_new_tokens) > 80:
            raise ValueError(
                f"length_penalty {self.length_penalty} over {self.max_new_tokens} tokens leaves float32; "
                "use one nearer to 0"
            )


class BeamFields(TypedDict, total=False):
    """The fields of :class:`BeamParams` as keyword arguments."""

    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_new_tokens: int
    stop_token_ids: Sequence[int] | None


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and what to do with it.

    Attributes:
        prompt_index: The prompt's index in the user's list.
        tokens: ``[length]`` int32, at least one; kept as a read-only copy.
        params: ``SamplingParams`` or ``BeamParams``.
        occurrence: How many requests before this one have the same tokens; the key of the random stream depends on it,
            so that equal prompts get different samples.
        indices: With ``SamplingParams``, ascending indices of the samples that are wanted; None: 0 to ``params.n - 1``.
        priority: If not all requests fit, those of a higher priority are admitted first.
        matcher: State of the grammar of ``params`` at the prompt's end; each sample continues from a fork of it.  A
            session sets it.

    Raises:
        ValueError: tokens are empty or not token ids, or a number or ``indices`` are out of range.
        TypeError: a field is of another type.
    """

    prompt_index: int
    tokens: NDArray[np.int32]
    params: SamplingParams | BeamParams
    occurrence: int = 0
    indices: Sequence[int] | None = None
    priority: int = 0
    matcher: Matcher | None = None

    def __post_init__(self) -> None:
        as_integer("prompt_index", self.prompt_index, 0, "count prompts from 0")
        as_integer("occurrence", self.occurrence, 0, "count equal prompts from 0")
        priority = as_integer("priority", self.priority, -(2**63), "use a number of 64 bits")
        object.__setattr__(self, "priority", priority)
        if not isinstance(self.params, SamplingParams | BeamParams):
            raise TypeError(f"params must be SamplingParams or BeamParams, got {type(self.params).__name__}")
        tokens = np.asarray(self.tokens)
        where = f"prompt {self.prompt_index}"
        if isinstance(self.tokens, str):
            raise TypeError(f"{where}: tokens must be integers, got text; encode it first, or call generate()")
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"{where}: tokens must be a list of at least one id, got shape {list(tokens.shape)}")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise TypeError(f"{where}: tokens must be integers, got {tokens.dtype}; encode the text first")
        if tokens.min() < 0 or tokens.max() >= 2**31:
            raise ValueError(
                f"{where}: token ids must be in [0, 2**31), got {tokens.min()} to {tokens.max()}; "
                "remove padding and ignored labels"
            )
        copy = tokens.astype(np.int32)
        copy.flags.writeable = False
        object.__setattr__(self, "tokens", copy)
        if self.indices is not None:
            object.__setattr__(self, "indices", self._checked_indices(where))

    def _checked_indices(self, where: str) -> Sequence[int]:
        given = self.indices
        if self.params.forks:
            raise ValueError(f"{where}: indices are of samples, and beams have none; leave them out")
        if isinstance(given, range) and given and given.start >= 0 and given.step > 0:
            return given
        numbers = tuple(
            as_integer("a sample's index", one, 0, "count samples from 0")
            for one in as_list("indices", given, "integers")
        )
        if not numbers or any(one >= other for one, other in pairwise(numbers)):
            raise ValueError(f"{where}: indices must be ascending, at least one, got {list(numbers)[:8]}")
        return numbers

    def __repr__(self) -> str:
        more = "".join(
            f", {name}={value}"
            for name, value in (("occurrence", self.occurrence), ("priority", self.priority))
            if value
        )
        samples = "" if self.indices is None else f", {len(self.indices)} samples"
        return f"Request(prompt_index={self.prompt_index}, {len(self.tokens)} tokens{samples}, {self.params}{more})"

    @property
    def sample_indices(self) -> Sequence[int]:
        """The indices of the samples that are wanted; 0 alone for a beam search."""
        if self.indices is not None:
            return self.indices
        return range(self.params.runs)


@dataclass(frozen=True)
class Sample:
    """One finished continuation.

    Attributes:
        prompt_index: Which prompt it continues.
        index: Which of the prompt's samples it is, from 0; for beams its rank, 0 the best.
        tokens: The sampled tokens, a final stop token included: each access makes a new list from an int32 array.
        logprobs: The natural logarithm of each token's probability: by default the model's own, before any penalty,
            temperature or filter; with ``SamplingParams(logprobs="sampled")`` the probability with which the token was
            sampled.  Each access makes a new list from a float32 array.
        text: The sampled text, without the stop token, cut before the stop string.
        finish_reason: ``"stop"`` after a stop token, string or function, and, without stop tokens, after a complete
            text of the grammar; ``"length"`` after ``max_new_tokens``; ``"dead_end"`` if the grammar allows no token
            that the model can sample and the text may not end, or a logits processor excludes all tokens.
        score: A beam's length-normalised log-probability; ``None`` unless it is a beam.
        masses: With ``SamplingParams(logprobs="sampled")``, for each token the total probability of the tokens that
            top-k, top-p and min-p kept, before renormalising; each access makes a new list from a float32 array.
            ``None`` otherwise.
    """

    prompt_index: int
    index: int
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: FinishReason
    score: float | None = None
    masses: list[float] | None = None

    def __repr__(self) -> str:
        score = "" if self.score is None else f", score={self.score:.4g}"
        which, text = f"prompt_index={self.prompt_index}, index={self.index}", shortened(self.text)
        return (
            f"Sample({which}, {token_count(self)} tokens, text={text!r}, finish_reason={self.finish_reason!r}{score})"
        )


class _Packed:
    """A field that is read as a list and held as an array: 4 bytes per number, where a list takes 32 or more."""

    def __init__(self, name: str, dtype: type[np.generic]) -> None:
        self._name, self._dtype = name, dtype

    def __get__(self, sample: Any, owner: type) -> Any:
        held = self if sample is None else sample.__dict__[self._name]
        return held.tolist() if isinstance(held, np.ndarray) else held

    def __set__(self, sample: Any, numbers: ArrayLike | None) -> None:
        sample.__dict__[self._name] = None if numbers is None else np.array(numbers, dtype=self._dtype)


for _name, _dtype in (("tokens", np.int32), ("logprobs", np.float32), ("masses", np.float32)):
    # Set after the class is made, because a dataclass would take the descriptor for a default.
    setattr(Sample, _name, _Packed(_name, _dtype))


def token_count(sample: Sample) -> int:
    """The number of a sample's tokens, without making a list of them."""
    return len(sample.__dict__["tokens"])


@dataclass(frozen=True)
class TokenEvent:
    """One token, the moment it is sampled.

    Attributes:
        prompt_index: Which prompt it continues.
        index: Which of the prompt's samples it belongs to.
        token: Its id.
        logprob: As in the sample.
        text: The text that is final after this token: often the token's own text, and empty while a character or a
            possible stop string is incomplete.  The texts of a sample's events, joined, are the sample's text.
        finish_reason: Set on a sample's last token only.  If a sample ends because no token is allowed, its last event
            has no token: ``token`` is -1, and ``logprob`` is ``-inf``.
    """

    prompt_index: int
    index: int
    token: int
    logprob: float
    text: str = ""
    finish_reason: FinishReason | None = None
