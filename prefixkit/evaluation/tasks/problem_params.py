"""The sampling parameters of a problem: its own override those of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefixkit.evaluation.tasks.fields import known_keys
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.sampling.params import SamplingParams

PARAMS = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "seed"),
    "stop",
)


def check_params(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a file gives for one problem, as JSON values; ``stop`` becomes a list.

    Raises:
        ValueError: a parameter is unknown, of another type, or out of range.
    """
    known_keys(where, given, PARAMS, "params")
    try:
        params = SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: params: {error}") from error
    checked = {name: getattr(params, name) for name in given}
    return checked | ({"stop": list(params.stop)} if "stop" in given else {})


def sampling_params(problem: Problem, common: SamplingParams, chat: bool) -> SamplingParams:
    """The sampling parameters of a problem: its own values, and for all others those of ``common``.

    An answer ends at the stop strings of all three: ``common``, the problem's own, and those of its data set.
    """
    own = dict(problem.params)
    ends = problem.chat_stop if chat else problem.text_stop
    return replace(common, **own | {"stop": (*common.stop, *own.get("stop", ()), *ends)})
