"""What a user asks for and what comes back: parameters, requests, samples and streamed tokens, as frozen values."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How to draw ``n`` independent continuations of one prompt.

    The filters act in the order of the fields below, on the model's float32 logits (see ``sampling.draw``).

    Attributes:
        n: Samples of the prompt; sample ``i`` is the same whether 1 or 1,000 are asked for.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that the sequence, prompt
            included, already holds; 1.0 is off (Keskar et al. 2019, section 4.1).
        temperature: Divides the logits; 0 is greedy: the likeliest token, the lowest id among equals.
        top_k: Keep the ``top_k`` likeliest tokens; 0 is off.
        top_p: Keep the fewest likeliest tokens that hold this probability; 1.0 is off (Holtzman et al. 2020).
        min_p: Keep tokens at least ``min_p`` times as likely as the likeliest; 0.0 is off (Nguyen et al. 2024).
        max_new_tokens: Most tokens to draw for one sample.
        seed: 0 to 2**64 - 1.  Equal seed, sample index, prompt and occurrence (see ``Request``) draw from equal random
            numbers.
        stop_token_ids: Tokens that end a sample; the one drawn is its last token and not in its text.
        stop: Strings that end a sample; its text ends before the first of them.  They may be or hold special tokens:
            see ``StopChecker``.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Normalised fields (1 -> 1.0, list -> tuple) keep equal requests equal and hashable.
        fields: dict[str, object] = {
            "n": _integer("n", self.n, 1, "ask for at least one sample"),
            "temperature": _number("temperature", self.temperature),
            "top_k": _integer("top_k", self.top_k, 0, "use 0 to keep every token"),
            "top_p": _number("top_p", self.top_p),
            "min_p": _number("min_p", self.min_p),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty),
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, 1, "ask for at least one token"),
            "seed": _integer("seed", self.seed, 0, "use a seed from 0 to 2**64 - 1"),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "stop": _stop_strings(self.stop),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        # Below 1e-6 a logit divided by the temperature stops being a useful float32.
        if not (self.temperature == 0 or self.temperature >= 1e-6):
            raise ValueError(
                f"temperature must be 0 or at least 1e-6, got {self.temperature}; use 0 to take the likeliest token"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; use 1.0 to keep every token")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}; use 0.0 to keep every token")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}; use 1.0 for none")
        if self.seed >= 2**64:
            raise ValueError(f"seed must be below 2**64, got {self.seed}; use a seed from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class BeamParams:
    """How to search for the likeliest continuations of one prompt.

    Attributes:
        num_beams: Sequences kept alive at every step, and finished sequences kept.
        num_return_sequences: How many finished sequences to return, best first; at most ``num_beams``.
        length_penalty: A finished sequence scores ``sum of log-probabilities / length ** length_penalty``; above 0
            favours long ones, below 0 short ones.  Length counts drawn tokens, the stop token included.
        early_stopping: ``True`` stops once ``num_beams`` sequences are finished.  ``False`` goes on while the best live
            beam, scored at its present length, beats the worst finished one.  ``"never"`` scores it at
            the length most favourable to it, so that nothing better can be missed.
        max_new_tokens: Most tokens to draw.
        stop_token_ids: Tokens that finish a sequence.
    """

    num_beams: int
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        fields: dict[str, object] = {
            "num_beams": _integer("num_beams", self.num_beams, 1, "keep at least one beam"),
            "num_return_sequences": _integer(
                "num_return_sequences", self.num_return_sequences, 1, "ask for at least one sequence"
            ),
            "length_penalty": _number("length_penalty", self.length_penalty),
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, 1, "ask for at least one token"),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences must be at most num_beams, got {self.num_return_sequences} of "
                f"{self.num_beams} beams; raise num_beams or return fewer"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")
        # Scores are float32: their divisor has to be one too, and not 0.
        if abs(self.length_penalty) * math.log(self.max_new_tokens) > 80:
            raise ValueError(
                f"length_penalty {self.length_penalty} over {self.max_new_tokens} tokens leaves float32; "
                "use one nearer to 0"
            )


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and what to do with it.

    Attributes:
        prompt_index: The prompt's place in the user's list.
        tokens: ``[length]`` int32, at least one; kept as a read-only copy.
        params: ``SamplingParams`` or ``BeamParams``.
        occurrence: How many requests before this one have the same tokens; it enters the random stream, so that equal
            prompts draw different samples.
    """

    prompt_index: int
    tokens: NDArray[np.int32]
    params: SamplingParams | BeamParams
    occurrence: int = 0

    def __post_init__(self) -> None:
        _integer("prompt_index", self.prompt_index, 0, "count prompts from 0")
        _integer("occurrence", self.occurrence, 0, "count equal prompts from 0")
        if not isinstance(self.params, SamplingParams | BeamParams):
            raise TypeError(f"params must be SamplingParams or BeamParams, got {type(self.params).__name__}")
        tokens = np.asarray(self.tokens)
        where = f"prompt {self.prompt_index}"
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


@dataclass(frozen=True)
class Sample:
    """One finished continuation.

    Attributes:
        prompt_index: Which prompt it continues.
        index: Which of the prompt's samples it is, from 0; for beams its rank, 0 the best.
        tokens: The drawn tokens, a final stop token included: a list made anew at each access from an int32 array.
        logprobs: The model's own log-probability of each: natural logarithm, before any penalty, temperature or filter;
            likewise, from a float32 array.
        text: The drawn text, without the stop token, cut before the stop string.
        finish_reason: ``"stop"`` for a stop token or string, ``"length"`` after ``max_new_tokens``.
        score: A beam's length-normalised log-probability; ``None`` for a drawn sample.
    """

    prompt_index: int
    index: int
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: FinishReason
    score: float | None = None


class _Packed:
    """A field that is read as a list and held as an array: 4 bytes a number, not 32 or more."""

    def __init__(self, name: str, dtype: type[np.generic]) -> None:
        self._name, self._dtype = name, dtype

    def __get__(self, sample: Any, owner: type) -> Any:
        return self if sample is None else sample.__dict__[self._name].tolist()

    def __set__(self, sample: Any, numbers: ArrayLike) -> None:
        sample.__dict__[self._name] = np.array(numbers, dtype=self._dtype)


for _name, _dtype in (("tokens", np.int32), ("logprobs", np.float32)):
    setattr(
        Sample, _name, _Packed(_name, _dtype)
    )  # after the class is made, for a dataclass would take it for a default


@dataclass(frozen=True)
class TokenEvent:
    """One token, the moment it is drawn.

    Attributes:
        prompt_index: Which prompt it continues.
        index: Which of the prompt's samples it belongs to.
        token: Its id.
        logprob: The model's own log-probability of it.
        text: The text that has become certain with it: often its own, empty while a character or a possible stop string
            is incomplete.  A sample's events joined are its text.
        finish_reason: Set on a sample's last token only.
    """

    prompt_index: int
    index: int
    token: int
    logprob: float
    text: str = ""
    finish_reason: FinishReason | None = None


def _integer(name: str, value: object, least: int, remedy: str) -> int:
    try:
        if isinstance(value, bool | np.bool_) or not isinstance(value, SupportsIndex):
            raise TypeError
        number = operator.index(value)  # arrays and tensors have it too, and refuse what is no single integer
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}; {remedy}")
    return number


def _number(name: str, value: object) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    return float(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a tuple of token ids, got {value!r}; write a single id as (id,)")
    return tuple(dict.fromkeys(_integer(name, token, 0, "token ids count from 0") for token in value))


def _stop_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"stop must be a tuple of strings, got {value!r}; write a single string as (string,)")
    strings = tuple(value)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop must hold strings, got {type(string).__name__} {string!r}")
        if not string:
            raise ValueError("stop must not hold an empty string: it would stop every sample at once; remove it")
    return tuple(dict.fromkeys(strings))
