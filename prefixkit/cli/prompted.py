"""The input of ``prefixkit sample``: settings, problems as prompts of one model, and their manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefixkit.cli.commands.env import versions
from prefixkit.evaluation.campaign.folder import Asked, Part
from prefixkit.evaluation.campaign.manifest import Manifest, describe_prompts, tokenizer_fingerprint
from prefixkit.evaluation.tasks.answers import begun
from prefixkit.evaluation.tasks.encode import encode_all
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.problem_params import sampling_params
from prefixkit.evaluation.tasks.prompting import Prompting
from prefixkit.sampling.params import SamplingParams


@dataclass(frozen=True)
class Settings:
    """The options of ``prefixkit sample``, except for the problems and the sampling parameters.

    Attributes:
        model, revision, dtype, device: What to load, and where.
        kv_dtype: The dtype in which pages hold K and V, see :func:`prefixkit.patch`.
        prompting: How problems are asked.
        chat: Whether prompts go through the chat template; None: if the tokenizer has one.
        run: The run folder; None: standard output.
        first_index: The first sample index of each prompt; the last is ``n - 1``, whatever the first.
        part: The part of the samples that this process samples.
        in_flight: The most samples at once; None: the device's default.
        round: The number of sample indices after which candidates are judged and solved problems get no more samples;
            None: never.
        kv_budget, page_size, compiled: Settings of the session.
        tensor_parallel: Whether the model is split over the processes that torchrun has started.
        logprobs: Whether samples carry log-probabilities.
        quiet: Whether to show neither progress nor report.
    """

    model: str
    prompting: Prompting = Prompting()
    chat: bool | None = None
    revision: str | None = None
    dtype: str = "auto"
    kv_dtype: str | None = None
    device: str = "auto"
    run: Path | None = None
    first_index: int = 0
    part: Part = Part()
    in_flight: int | None = None
    round: int | None = None
    kv_budget: str | None = None
    page_size: int = 16
    compiled: bool = False
    tensor_parallel: bool = False
    logprobs: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Prompted:
    """A problem as a prompt of one model.

    Attributes:
        asked: The problem, and the part of the program that precedes a sample.
        tokens: ``[length]`` the token ids of the prompt.
        params: Its sampling parameters.
    """

    asked: Asked
    tokens: list[int]
    params: SamplingParams


def prompted(tokenizer: Any, problems: Sequence[Problem], params: SamplingParams, chat: bool) -> list[Prompted]:
    """Problems as prompts of a model."""
    tokens = encode_all(tokenizer, problems, chat)
    return [
        Prompted(Asked(one, begun(one, chat)), tokens[one.id], sampling_params(one, params, chat)) for one in problems
    ]


def manifest_of(
    asked: Sequence[Prompted], params: SamplingParams, settings: Settings, tokenizer: Any, chat: bool
) -> Manifest:
    """The manifest of the samples, with the fields that are known before the model is loaded."""
    common = _as_json(params)
    own = [{key: value for key, value in _as_json(one.params).items() if value != common[key]} for one in asked]
    ids, tokens = [one.asked.problem.id for one in asked], [np.array(one.tokens, np.int32) for one in asked]
    return Manifest(
        model=settings.model,
        fingerprint="",
        tokenizer=tokenizer_fingerprint(tokenizer),
        dtype=settings.dtype,
        chat=chat,
        params=common,
        logprobs=settings.logprobs,
        prompts=describe_prompts(ids, tokens, own),
        versions=versions(),
    )


def _as_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that samples depend on, except for the tokens that end them, which are part of the fingerprint."""
    others = ("n", "logits_processors", "stop_token_ids", "logprobs", "grammar")
    return {**{name: value for name, value in vars(params).items() if name not in others}, "stop": list(params.stop)}
