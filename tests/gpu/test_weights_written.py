"""Weights that are written to between calls, with CUDA graphs and compiled layers: no KV, number or code of before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import prefixkit
from prefixkit import Session
from prefixkit.models.weights.content import kv_version
from tests.gpu.test_model import model_of

PROMPT = [3 + 7 * index % 250 for index in range(700)]
OPTIONS: dict[str, Any] = {"n": 4, "max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": ()}


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


WAYS: dict[str, Callable[[Any], Any]] = {
    "everything": lambda m: [one.data.mul_(1.5) for one in m.parameters()],
    "moving average": lambda m: [one.data.mul_(0.98).add_(torch.randn_like(one), alpha=0.02) for one in m.parameters()],
    "one row": lambda m: attention(m).k_proj.weight.data[5].mul_(-20),
    "one element": lambda m: attention(m).k_proj.weight.data[5, 3].fill_(90),
    "scaling": lambda m: setattr(attention(m), "scaling", 2.0),
    "epsilon": lambda m: setattr(m.model.layers[1].input_layernorm, "variance_epsilon", 9.0),
}


def sampled(session: Session) -> list[list[int]]:
    return [sample.tokens for sample in session.generate([PROMPT], **OPTIONS)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", WAYS)
def test_a_session_samples_as_one_that_never_had_other_weights(way: str, compiled: bool) -> None:
    model = prefixkit.patch(model_of(64, torch.bfloat16))
    with Session(model, None, kv_budget="16MiB", compiled=compiled) as session:
        before = sampled(session)
        session.generate([PROMPT], **OPTIONS)
        assert session.report.prompt_tokens_found == len(PROMPT)
        WAYS[way](model)
        after = sampled(session)
        assert session.report.prompt_tokens_found == 0
    with Session(copy.deepcopy(model), None, kv_budget="16MiB", compiled=compiled) as other:
        assert sampled(other) == after != before


def test_packing_weights_leaves_their_version() -> None:
    model = prefixkit.patch(model_of(64, torch.bfloat16))
    version = kv_version(model)
    with Session(model, None, kv_budget="16MiB", compiled=True) as session:
        sampled(session)
        assert kv_version(model) == version
    prefixkit.unpatch(model)
    assert kv_version(model) == version
