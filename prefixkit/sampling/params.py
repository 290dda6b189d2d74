"""Sampling parameters: their meaning, their checks, and the checks of other arguments."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from prefixkit.sampling.grammar import Grammar

if TYPE_CHECKING:
    from torch import Tensor

    LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

MOST_ITEMS = 2**22  # most items of a list argument: more come from an endless iterator
StopFunction = Callable[[list[int], str], bool]
Logprobs = Literal["model", "sampled"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample ``n`` independent continuations of one prompt.

    The filters act in the order of the fields below, on the model's float32 logits (see ``sampling.specification``).

    Attributes:
        n: Number of samples of the prompt; sample ``i`` does not depend on ``n``.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that the sequence, prompt
            included, already holds; 1.0 is off (Keskar et al. 2019, section 4.1).
        temperature: Divides the logits; 0 is greedy: the likeliest token, the lowest id among equals.
        top_k: Keep the ``top_k`` likeliest tokens; 0 is off.
        top_p: Keep the fewest likeliest tokens with at least this probability in total; 1.0 is off (Holtzman et al.
            2020).
        min_p: Keep tokens at least ``min_p`` times as likely as the likeliest; 0.0 is off (Nguyen et al. 2024).
        max_new_tokens: Most tokens to sample for one sample.
        seed: 0 to 2**64 - 1.  Equal seed, sample index, prompt and occurrence (see ``Request``) use equal random
            numbers.
        stop_token_ids: Tokens that end a sample; the stop token is the sample's last token and is not in its text.
            None: the model's end-of-sequence tokens.
        stop: Strings that end a sample; its text ends before the first of them.  They may contain the text of special
            tokens.  Or functions ``(tokens, text) -> bool`` of the sample's tokens so far and of their text; a sample
            ends after the token at which one returns True.
        logits_processors: Makes a function for each sample, which takes ``[1, length]`` int64 token ids, prompt
            included, and ``[1, vocab]`` float32 logits, and returns the logits to sample from: a logits processor of
            transformers, or a ``LogitsProcessorList``, is one.  It sees only the steps of its sample, in order, so it
            may keep state.  The filters above act on the logits that it returns.
        logprobs: Which log-probabilities samples have: ``"model"``, those of the model, the log-softmax of its
            unchanged logits; ``"sampled"``, those with which tokens were sampled, after processors, penalty,
            temperature and filters.  With ``"sampled"`` samples have ``masses`` too.
        grammar: A grammar of ``prefixkit.integrations`` that the sample's text after the prompt must match.  Before the
            filters act, tokens that the grammar does not allow are masked; stop tokens are allowed exactly where the
            text may end.

    Raises:
        ValueError, TypeError: a field is out of range, or of another type.
    """

    forks = False  # whether a run forks its sequences
    sequences_per_run = 1

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    stop: tuple[str | StopFunction, ...] = ()
    logits_processors: Callable[[], LogitsProcessor] | None = None
    logprobs: Logprobs = "model"
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        # Normalised fields (1 -> 1.0, list -> tuple) keep equal requests equal and hashable.
        fields: dict[str, object] = {
            "n": as_integer("n", self.n, 1, "ask for 1 sample to 2**31 - 1", 2**31 - 1),
            "temperature": as_number("temperature", self.temperature),
            "top_k": as_integer("top_k", self.top_k, 0, "use 0 to keep every token"),
            "top_p": as_number("top_p", self.top_p),
            "min_p": as_number("min_p", self.min_p),
            "repetition_penalty": as_number("repetition_penalty", self.repetition_penalty),
            "max_new_tokens": as_integer("max_new_tokens", self.max_new_tokens, 1, "ask for at least one token"),
            "seed": as_seed(self.seed),
            "stop_token_ids": None
            if self.stop_token_ids is None
            else as_token_ids("stop_token_ids", self.stop_token_ids),
            "stop": as_stops("stop", () if self.stop is None else self.stop),
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
        if not self.repetition_penalty >= 1e-6:  # below, logits leave float32
            raise ValueError(f"repetition_penalty must be at least 1e-6, got {self.repetition_penalty}; 1.0 is none")
        if self.logits_processors is not None and not callable(self.logits_processors):
            raise TypeError(
                f"logits_processors must be a function that makes one for each sample, got "
                f"{type(self.logits_processors).__name__}; wrap it: lambda: LogitsProcessorList(...)"
            )
        if self.logits_processors is not None and not _takes(self.logits_processors):
            raise TypeError(
                "logits_processors must be a function without arguments that makes a processor for each sample, got "
                f"{self.logits_processors!r}, which takes arguments; wrap a processor: lambda: processor"
            )
        if self.logprobs not in ("model", "sampled"):
            raise ValueError(f"logprobs must be 'model' or 'sampled', got {self.logprobs!r}")
        _check_grammar(self.grammar)

    def __repr__(self) -> str:
        """The fields that differ from their defaults."""
        given = ((one, getattr(self, one.name)) for one in fields(self))
        return f"SamplingParams({', '.join(f'{one.name}={value!r}' for one, value in given if value != one.default)})"

    @property
    def runs(self) -> int:
        """Number of runs of one prompt: its samples."""
        return self.n

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings of ``stop``."""
        return tuple(one for one in self.stop if isinstance(one, str))

    @cached_property
    def stop_functions(self) -> tuple[StopFunction, ...]:
        """The functions of ``stop``."""
        return tuple(one for one in self.stop if not isinstance(one, str))

    @property
    def greedy(self) -> bool:
        """Whether sampling takes the likeliest token."""
        return self.temperature == 0

    @cached_property
    def drawn(self) -> bool:
        """Whether the wanted log-probabilities differ from the model's: they do not if nothing changes the logits."""
        off = self.temperature == self.repetition_penalty == self.top_p == 1 and self.top_k == self.min_p == 0
        return self.logprobs == "sampled" and not (off and self.logits_processors is None and self.grammar is None)


class SamplingFields(TypedDict, total=False):
    """The fields of :class:`SamplingParams` as keyword arguments; ``n`` and ``seed`` may be lists, one per prompt."""

    n: int | Sequence[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    seed: int | Sequence[int]
    stop_token_ids: Sequence[int] | None
    stop: str | StopFunction | Sequence[str | StopFunction] | None
    logits_processors: Callable[[], LogitsProcessor] | None
    logprobs: Logprobs
    grammar: Grammar | None


def _check_grammar(given: object) -> None:
    if not isinstance(given, Grammar | None) or isinstance(given, type):
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise TypeError(
            f"grammar must be a grammar, got {what}; make one: "
            "prefixkit.integrations.xgrammar.json_schema(schema), or regex(...), or ebnf(...)"
        )
    try:
        hash(given)
    except TypeError as error:
        raise TypeError(
            f"grammar must be hashable, for it is compiled once for each tokenizer, got {type(given).__name__}: "
            f"{error}; make it a frozen dataclass"
        ) from error


def as_integer(name: str, value: object, least: int, remedy: str, most: int = 2**63 - 1) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        # Arrays and tensors raise here unless they hold a single integer.
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}") from None
    if not least <= number <= most:
        bound = f"at least {least}" if number < least else f"at most {most}"
        raise ValueError(f"{name} must be {bound}, got {number}; {remedy}")
    return number


def as_seed(value: object) -> int:
    return as_integer("seed", value, 0, "use a seed from 0 to 2**64 - 1", 2**64 - 1)


def as_number(name: str, value: object) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value}")
    return number


def as_list(name: str, value: Any, of: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        got = f"{type(value).__name__} {value!r}"
        raise TypeError(f"{name} must be a list of {of}, got {got}; put a single one into a list")
    items = list(islice(value, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise ValueError(f"{name} must be at most {MOST_ITEMS:,} {of}, got more: pass an iterable that ends")
    return items


def as_token_ids(name: str, value: object) -> tuple[int, ...]:
    tokens = as_list(name, value, "token ids")
    known = "token ids are 0 to 2**31 - 1"
    return tuple(dict.fromkeys(as_integer(name, token, 0, known, 2**31 - 1) for token in tokens))


def _takes(function: Callable[..., object], *arguments: str) -> bool:
    """Whether a function can be called with these arguments; True where Python does not know its signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def as_stops(name: str, value: object) -> tuple[str | StopFunction, ...]:
    stops = [value] if isinstance(value, str) or callable(value) else as_list(name, value, "strings or functions")
    for one in stops:
        if not isinstance(one, str) and not callable(one):
            raise TypeError(f"{name} must hold strings or functions, got {type(one).__name__} {one!r}")
        if one == "":
            raise ValueError(f"{name} must not hold an empty string: it would stop every sample at once; remove it")
        if callable(one) and not _takes(one, "tokens", "text"):
            raise TypeError(
                f"a function of {name} must take two arguments, the sample's tokens and their text, got {one!r}; "
                "write lambda tokens, text: ..."
            )
    return tuple(one for i, one in enumerate(stops) if one not in stops[:i])  # functions may have no hash
