"""Conversion of users' prompts and parameters to requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.request import BeamFields, BeamParams, Request
from prefixkit.engine.scoring.contexts import Text
from prefixkit.models import ModelFacts
from prefixkit.sampling.params import SamplingFields, SamplingParams, as_list
from prefixkit.session.call_results import check_length
from prefixkit.session.grammars import matchers_of
from prefixkit.session.prompts import Prompt, check_ids, encode_prompts, occurrences, refuse_padding, text_tokens

Prompts = Prompt | Iterable[Prompt]
# Fields of transformers' GenerationConfig that are refused.
REFUSED_FIELDS = {
    # Refused unless logits processors are given, which then decide how logits are processed.
    "logits": "no_repeat_ngram_size encoder_no_repeat_ngram_size min_length min_new_tokens epsilon_cutoff eta_cutoff "
    "remove_invalid_values typical_p guidance_scale encoder_repetition_penalty top_h bad_words_ids suppress_tokens "
    "begin_suppress_tokens forced_bos_token_id forced_eos_token_id sequence_bias watermarking_config "
    "exponential_decay_length_penalty",
    # Other search methods, stop criteria and ways of reading the prompt.
    "calls": "num_beams num_beam_groups diversity_penalty penalty_alpha dola_layers constraints force_words_ids "
    "max_time token_healing is_assistant assistant_ensemble_weight",
}
# The number at which a field has no effect, 0 for fields not listed; None and empty values have no effect either.
_NEUTRAL: dict[str, float | None] = {
    **{"repetition_penalty": 1, "encoder_repetition_penalty": 1, "typical_p": 1, "guidance_scale": 1, "num_beams": 1},
    **{"num_beam_groups": 1, "forced_bos_token_id": None, "forced_eos_token_id": None, "top_h": None},
    **{"max_time": None, "length_penalty": None},
}

# What to give in place of a name of transformers or vLLM: a field, or something that begins with one and "=".
_ELSEWHERE = {
    **{"num_return_sequences": "n", "max_length": "max_new_tokens", "do_sample": "temperature=0 for likeliest tokens"},
    **{"stop_strings": "stop", "eos_token_id": "stop_token_ids", "logits_processor": "logits_processors"},
    **{"max_tokens": "max_new_tokens", "ignore_eos": "stop_token_ids=() to sample past the end"},
}

Params = TypeVar("Params", bound=SamplingParams | BeamParams)


def requests_for(
    kind: type[Params],
    facts: ModelFacts,
    tokenizer: Any,
    prompts: Prompts,
    params: Params | Sequence[Params] | None,
    fields: SamplingFields | BeamFields,
) -> list[Request]:
    """A request for each prompt, with parameters as :func:`prefixkit.generate` or :func:`prefixkit.beam_search` takes
    them, of one ``kind``; everything is checked.
    """
    encoded = _encoded(facts, tokenizer, prompts)
    each = params_of_each((kind,), facts, params, fields, len(encoded), "one for all or one per prompt", "prompts")
    each = _checked(facts, tokenizer, each)
    rows = zip(encoded, each, occurrences(encoded), matchers_of(facts, tokenizer, each), strict=True)
    return [
        Request(index, tokens, own, before, matcher=matcher)
        for index, (tokens, own, before, matcher) in enumerate(rows)
    ]


def prompt_requests(facts: ModelFacts, tokenizer: Any, prompts: Prompts) -> list[Request]:
    """A request for each prompt that computes its KV; its one sampled token is not used."""
    return text_requests(_encoded(facts, tokenizer, prompts))


def text_requests(texts: Iterable[NDArray[np.int32]]) -> list[Request]:
    """A request for each text of token ids, which needs memory for the pages of its text."""
    params = SamplingParams(temperature=0, max_new_tokens=1, stop_token_ids=())
    return [Request(index, tokens, params) for index, tokens in enumerate(texts)]


def is_one_prompt(prompts: Any) -> bool:
    """Whether ``prompts`` is a string, a list of token ids or a list of chat messages, not a list of prompts."""
    if getattr(prompts, "ndim", None) is not None:
        return bool(prompts.ndim == 1)
    first = next(iter(prompts), None) if isinstance(prompts, Sequence) else None
    return isinstance(first, int | np.integer | Mapping) or isinstance(prompts, str)


def scored_tokens(
    facts: ModelFacts, tokenizer: Any, prompts: Any, continuations: Any, one: bool
) -> tuple[list[NDArray[np.int32]], list[list[NDArray[np.int32]]]]:
    """Token ids of prompts, and of the continuations of each; everything is checked.

    With ``one``, ``prompts`` is a list of a single prompt.  :meth:`prefixkit.Session.score` documents arguments and
    errors.
    """
    facts.check_lm_head()
    encoded = _encoded(facts, tokenizer, prompts)
    as_own = partial(as_list, "continuations", of="strings or of lists of token ids")
    given = [as_own(own) if isinstance(own, Iterator) else own for own in as_own(continuations)]
    several = not one and bool(given) and all(_is_list_of_continuations(own) for own in given)
    each = given if several else [given] * len(encoded)
    if len(each) != len(encoded):
        raise ValueError(
            f"continuations must be one list for all prompts or one for each, got {len(each)} lists for "
            f"{len(encoded)} prompts"
        )
    vocab = facts.vocab_size
    known: dict[int, list[NDArray[np.int32]]] = {}  # one list for all prompts is encoded once
    found = []
    for index, own in enumerate(each):
        if id(own) not in known:
            if not len(own):
                raise ValueError(f"prompt {index} has no continuations; pass at least one")
            named = enumerate(own)
            known[id(own)] = [continuation_tokens(tokenizer, one, vocab, f"continuation {i}") for i, one in named]
            if len(own) > 1 and not any(isinstance(tokens, str) for tokens in own):
                refuse_padding(known[id(own)], tokenizer, "continuation")
        found.append(known[id(own)])
    longest = max(len(prompt) + max(map(len, own)) for prompt, own in zip(encoded, found, strict=True))
    check_length(facts, longest, longest - 1)
    return encoded, found


def marked_tokens(facts: ModelFacts, tokenizer: Any, prompts: Any, at: Any, one: bool) -> list[Text]:
    """Prompts, and the positions whose values are wanted; everything is checked.

    With ``one``, ``prompts`` is a list of a single prompt.  :meth:`prefixkit.Session.values` documents arguments and
    errors.
    """
    encoded = _encoded(facts, tokenizer, prompts)
    longest = max(map(len, encoded))
    check_length(facts, longest, longest)
    if isinstance(at, str):
        if at not in ("last", "all"):
            raise ValueError(f"at must be 'last', 'all' or positions, got {at!r}")
        return [Text(tokens, np.arange(0 if at == "all" else len(tokens) - 1, len(tokens))) for tokens in encoded]
    each = [at] if one else as_list("at", at, "lists of positions, one for each prompt")
    if len(each) != len(encoded):
        raise ValueError(
            f"at must be one list of positions for each prompt, got {len(each)} for {len(encoded)}; "
            "for example at=[[0, -1]] for a list of one prompt"
        )
    pairs = enumerate(zip(each, encoded, strict=True))
    return [Text(tokens, _positions(own, len(tokens), index)) for index, (own, tokens) in pairs]


def _positions(given: Any, length: int, prompt: int) -> NDArray[np.int64]:
    """Positions in a prompt of ``length`` tokens, counted from the end where negative; ascending and distinct."""
    positions = np.asarray(given)
    if positions.ndim != 1 or not positions.size or not np.issubdtype(positions.dtype, np.integer):
        raise TypeError(f"prompt {prompt}: at must be a list of integers, at least one, got {given!r}")
    found = np.where(positions < 0, positions + length, positions).astype(np.int64)
    if found.min() < 0 or found.max() >= length:
        raise ValueError(
            f"prompt {prompt} has {length} tokens, and at={positions.tolist()} names others; "
            f"positions are {-length} to {length - 1}"
        )
    if (np.diff(found) <= 0).any():
        raise ValueError(
            f"prompt {prompt}: positions must be ascending and different, got {positions.tolist()} of {length} tokens; "
            f"give at={np.unique(found).tolist()}"
        )
    return found


def _is_list_of_continuations(one: Any) -> bool:
    """Whether ``one`` is a list of strings or of lists, not a continuation itself."""
    if isinstance(one, str | bytes) or not isinstance(one, Iterable):
        return False
    return all(isinstance(inner, str | Iterable) and getattr(inner, "ndim", 1) for inner in one)


def continuation_tokens(tokenizer: Any, one: Any, vocab: int, where: str = "tokens") -> NDArray[np.int32]:
    """Token ids of a string, without special tokens, or the given ids, checked; ``where`` names them in messages.

    Raises:
        ValueError, TypeError: see :meth:`prefixkit.SearchNode.extend`.
    """
    if isinstance(one, str):
        if tokenizer is None:
            raise ValueError(f"{where}: {one!r} is text, but tokenizer is None; pass token ids")
        one = text_tokens(tokenizer, one, where, add_special_tokens=False)
    tokens = np.asarray(one)
    if tokens.ndim != 1:
        raise ValueError(f"{where}: pass token ids of one dimension, got shape {list(tokens.shape)}")
    if tokens.size == 0:
        raise ValueError(f"{where}: pass at least one token, got none")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"{where}: token ids must be integers, got {tokens.dtype}; pass the text itself, or encode it")
    check_ids(where, tokens, vocab)
    return tokens.astype(np.int32)


def checked_requests(facts: ModelFacts, tokenizer: Any, requests: Iterable[Request]) -> list[Request]:
    """Requests of users, checked like those made from prompts, with their stop tokens."""
    asked = as_list("requests", requests, "prefixkit.Request")
    if not asked:
        raise ValueError("requests is empty; pass at least one request")
    for one in asked:
        if not isinstance(one, Request):
            raise TypeError(f"requests must be prefixkit.Request, got {type(one).__name__}; see generate() for prompts")
    for index, one in enumerate(asked):
        check_ids(f"prompt {index}", one.tokens, facts.vocab_size)
    each = _checked(facts, tokenizer, [one.params for one in asked])
    rows = zip(asked, each, matchers_of(facts, tokenizer, each), strict=True)
    return [replace(one, params=own, matcher=matcher) for one, own, matcher in rows]


def configured(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Fields of a generation config, without those that have no effect; empty if the config is None."""
    fields = [(name, getattr(config, name, None)) for name in names]
    return {name: of for name, of in fields if (of != _NEUTRAL.get(name, 0) if isinstance(of, int | float) else of)}


def _checked(facts: ModelFacts, tokenizer: Any, each: Sequence[Params]) -> list[Params]:
    """Parameters with stop tokens: by default the generation config's end-of-sequence tokens, or the tokenizer's.

    Raises:
        TypeError: the model has no language-model head.
        ValueError: the generation config sets a field that is not supported, stop strings need a tokenizer, or a given
            stop token is outside the vocabulary.
    """
    facts.check_lm_head()
    samples, logits = [own for own in each if isinstance(own, SamplingParams)], REFUSED_FIELDS["logits"].split()
    names = set(REFUSED_FIELDS["calls"].split()) - (set() if samples else {"num_beams"})
    if beams := len(samples) < len(each):
        names |= {"repetition_penalty", "stop_strings"}
    if beams or any(own.logits_processors is None for own in samples):
        names.update(logits)
    if asked := configured(facts.generation_config, sorted(names)):
        given = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        processors = "" if beams or asked.keys() - set(logits) else "pass logits_processors for it, "
        raise ValueError(
            f"the model's generation_config sets {given}, which is not applied here; call model.generate(), which "
            f"runs on the tree too, {processors}or set model.generation_config.{next(iter(asked))} = None"
        )
    for own in samples:
        if tokenizer is None and own.stop_strings:
            raise ValueError(
                f"stop strings {own.stop_strings!r} are looked for in text, but tokenizer is None; "
                "pass the model's tokenizer, or use stop_token_ids and stop=()"
            )
    ids = getattr(facts.generation_config, "eos_token_id", None)
    ids = getattr(tokenizer, "eos_token_id", None) if ids is None else ids
    found = () if ids is None else (int(ids),) if isinstance(ids, int) else tuple(int(token) for token in ids)
    found = tuple(token for token in found if 0 <= token < facts.vocab_size)  # some configs name others
    for stops in {own.stop_token_ids for own in each if own.stop_token_ids}:
        check_ids("stop_token_ids", np.array(stops), facts.vocab_size)
    return [own if own.stop_token_ids is not None else replace(own, stop_token_ids=found) for own in each]


def _encoded(facts: ModelFacts, tokenizer: Any, prompts: Prompts) -> list[NDArray[np.int32]]:
    return encode_prompts(tokenizer, prompts, facts.vocab_size)


def params_of_each(
    kinds: tuple[type[Params], ...],
    facts: ModelFacts,
    params: Params | Sequence[Params] | None,
    fields: SamplingFields | BeamFields,
    count: int,
    how: str,
    things: str,
) -> list[Params]:
    """Parameters for each of ``count`` things, from one set for all or one for each; ``fields`` replace their fields.

    If ``params`` is None, parameters are of the first kind, from ``fields`` and then the generation config.  The fields
    ``n`` and ``seed`` are one value, or one for each thing.  ``how`` says in messages how parameters are given.
    """
    changes: dict[str, Any] = {**fields}
    if params is None:
        asked = "repetition_penalty stop_strings" if kinds[0] is SamplingParams else "length_penalty early_stopping"
        found = configured(facts.generation_config, asked.split())
        if "stop_strings" in found:
            found["stop"] = found.pop("stop_strings")
        changes = found | changes
        _check_names(kinds[0], changes)
        if kinds[0] is BeamParams and "num_beams" not in changes:
            raise TypeError("beam search needs num_beams=..., or params=BeamParams(num_beams=...)")
    lists = {name: _values(name, changes.pop(name), count) for name in ("n", "seed") if name in changes}
    if params is None:
        params = kinds[0](**{name: values[0] for name, values in lists.items() if values}, **changes)
    named = " or ".join(kind.__name__ for kind in kinds)
    of = f"{named}, or one of them for all {things}"
    own = [params] * count if isinstance(params, SamplingParams | BeamParams) else as_list("params", params, of)
    if len(own) != count or not all(isinstance(one, kinds) for one in own):
        given = ", ".join(sorted({type(one).__name__ for one in own})) or "none"
        remedy = "; call beam_search" if BeamParams not in kinds and "BeamParams" in given else ""
        raise ValueError(f"params must be {named}, {how}, got {len(own)} ({given}) for {count} {things}{remedy}")
    if not fields:
        return own
    for kind in {type(one) for one in own}:
        _check_names(kind, [*changes, *lists])
    each = enumerate(own)
    return [replace(one, **changes, **{name: values[i] for name, values in lists.items()}) for i, one in each]


def _check_names(kind: type[Any], fields: Iterable[str]) -> None:
    """Raise TypeError if parameters of a kind lack a field of one of these names."""
    names = kind.__dataclass_fields__
    if unknown := [name for name in fields if name not in names]:
        of_ours, remedy = _ELSEWHERE.get(unknown[0], ""), ""
        if of_ours.partition("=")[0] in names:
            remedy = f"; in place of {unknown[0]} give {of_ours}"
        elif unknown[0] in BeamParams.__dataclass_fields__:
            remedy = f"; for {unknown[0]} call beam_search"
        raise TypeError(
            f"no parameter is named {unknown[0]!r}; the fields of {kind.__name__} are {', '.join(names)}{remedy}"
        )


def _values(name: str, value: Any, count: int) -> list[Any]:
    """The value for each prompt; the parameters check the values."""
    if isinstance(value, int) or getattr(value, "ndim", None) == 0:  # arrays and tensors of no dimension are numbers
        return [value] * count
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be one integer or one per prompt, got {type(value).__name__} {value!r}")
    values = value.tolist() if hasattr(value, "tolist") else as_list(name, value, "integers")
    if len(values) != count:
        raise ValueError(f"{name} must be one integer or one per prompt, got {len(values)} for {count} prompts")
    return list(values)
