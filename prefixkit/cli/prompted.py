"""Problems as they are asked of one model, and the manifest that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixkit.campaign.folder import Asked
from prefixkit.campaign.manifest import Manifest, describe_prompts, tokenizer_fingerprint
from prefixkit.cli.commands.env import versions
from prefixkit.sampling.params import SamplingParams
from prefixkit.tasks.answers import begun
from prefixkit.tasks.encode import encode_all
from prefixkit.tasks.params import sampling_params
from prefixkit.tasks.problem import Problem


@dataclass(frozen=True)
class Prompted:
    """A problem as it is asked of one model.

    Attributes:
        asked: The problem, and what of the program precedes a sample.
        tokens: ``[length]`` the prompt.
        params: How it is sampled.
    """

    asked: Asked
    tokens: list[int]
    params: SamplingParams


def prompted(tokenizer: Any, problems: Sequence[Problem], params: SamplingParams, chat: bool) -> list[Prompted]:
    """Problems as they are asked of a model."""
    tokens = encode_all(tokenizer, problems, chat)
    return [
        Prompted(Asked(one, begun(one, chat)), tokens[one.id], sampling_params(one, params, chat)) for one in problems
    ]


def manifest_of(
    asked: Sequence[Prompted],
    params: SamplingParams,
    tokenizer: Any,
    *,
    model: str,
    dtype: str,
    chat: bool,
    logprobs: bool,
) -> Manifest:
    """What the samples depend on, as far as it is known before the model is loaded."""
    common = _as_json(params)
    own = [{key: value for key, value in _as_json(one.params).items() if value != common[key]} for one in asked]
    ids, tokens = [one.asked.problem.id for one in asked], [np.array(one.tokens, np.int32) for one in asked]
    prompts = describe_prompts(ids, tokens, own)
    return Manifest(
        model=model,
        fingerprint="",
        tokenizer=tokenizer_fingerprint(tokenizer),
        dtype=dtype,
        chat=chat,
        params=common,
        logprobs=logprobs,
        prompts=prompts,
        versions=versions(),
    )


def _as_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that samples depend on, but for the tokens that end them, which are part of the fingerprint."""
    fields = {name: getattr(params, name) for name in params.__dataclass_fields__}
    for name in ("n", "logits_processors", "stop_token_ids"):
        del fields[name]
    return {**fields, "stop": list(params.stop)}
