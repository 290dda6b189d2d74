"""A campaign over a fake model: seed, index and prompt determine its samples, as for a real model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.request import Request, Sample
from prefixkit.engine.sharing_report import Report
from prefixkit.evaluation.campaign.folder import Asked, RunFolder, create
from prefixkit.evaluation.campaign.manifest import Manifest, describe_prompts
from prefixkit.evaluation.campaign.run import Goal, Progress, run_campaign
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import sample_key


def prompts_of(count: int) -> list[NDArray[np.int32]]:
    """Prompts; the third one equals the first."""
    prompts = [np.arange(i, i + 5, dtype=np.int32) for i in range(count)]
    if count > 2:
        prompts[2] = prompts[0]
    return prompts


def problems_of(count: int) -> list[Problem]:
    """Problems without tests."""
    return [Problem(f"p/{i}", f"case {i}", (), f"prompt {i}") for i in range(count)]


def manifest_of(count: int = 4, **changes: Any) -> Manifest:
    """A manifest for the prompts of :func:`prompts_of`, with ``changes`` of its fields."""
    prompts = describe_prompts([one.id for one in problems_of(count)], prompts_of(count), [{}] * count)
    fields: dict[str, Any] = {
        "model": "made up",
        "fingerprint": "f",
        "tokenizer": "t",
        "dtype": "float32",
        "chat": False,
        "params": {"temperature": 1.0, "seed": 7},
        "logprobs": True,
        "prompts": prompts,
        "versions": {"prefixkit": "0"},
    }
    return Manifest(**{**fields, **changes})


def folder_of(path: Path, count: int = 4, **changes: Any) -> RunFolder:
    """A new run folder."""
    return create(path, manifest_of(count, **changes), [Asked(one, "") for one in problems_of(count)])


def sample_of(request: Request, index: int) -> Sample:
    """Sample ``index`` of a request, from the fake model."""
    assert isinstance(request.params, SamplingParams)
    rng = np.random.default_rng(int(sample_key(request.params.seed, index, request.tokens, request.occurrence)))
    tokens = rng.integers(0, 1000, rng.integers(1, 9)).tolist()
    return Sample(request.prompt_index, index, tokens, [-0.5] * len(tokens), f"text\n“{tokens}”", "stop")


def sampler(
    requests: Sequence[Request], give: Callable[[Sample], None], order: np.random.Generator | None = None
) -> Report:
    """Pass the samples of requests to ``give``, in any order."""
    asked = [(request, index) for request in requests for index in request.sample_indices]
    for i in range(len(asked)) if order is None else order.permutation(len(asked)).tolist():
        give(sample_of(*asked[i]))
    return Report(samples=len(asked))


def sample(
    folder: RunFolder, n: int = 8, count: int = 4, first: int = 0, run: Any = sampler, **options: Any
) -> Progress:
    """Run a campaign of the fake model to its end."""
    goal_options = {key: options.pop(key) for key in ("part", "round") if key in options}
    goal = Goal(first, [n] * count, **goal_options)
    params = [SamplingParams(seed=7)] * count
    return run_campaign(folder, prompts_of(count), params, goal, run, **options)


def set_of(folder: RunFolder) -> set[tuple[Any, ...]]:
    """The results of a campaign as a set, independent of their order."""
    found = [(one["id"], one["index"], tuple(one["tokens"]), one["text"]) for one in folder.samples()]
    assert len(found) == len({one[:2] for one in found}), "a sample is there twice"
    return set(found)
