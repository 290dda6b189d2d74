"""Two sessions in two threads: captures, prompts and steps of one leave the other's samples as they are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import prefixkit
from prefixkit import BeamParams, SamplingParams, Session
from tests.gpu.test_model import model_of, prompts


def call(model: Any, number: int) -> list[list[int]]:
    """A new session, so that graphs are captured, in two calls; more samples than the other thread's."""
    found: list[list[int]] = []
    with Session(model, None, kv_budget="64MiB") as session:
        params = SamplingParams(n=5 + number, temperature=0.8, max_new_tokens=60, seed=number, stop_token_ids=())
        for _ in range(2):
            found += [sample.tokens for sample in session.generate(prompts(40 + number), params)]
        beams = BeamParams(3, max_new_tokens=20, stop_token_ids=())
        found += [sample.tokens for sample in session.beam_search(prompts(40 + number), beams)]
    return found


@pytest.mark.parametrize("models", [1, 2])
def test_sessions_in_two_threads_sample_what_they_sample_alone(models: int) -> None:
    made = [prefixkit.patch(model_of(128, torch.bfloat16)) for _ in range(models)]
    expected = [call(made[number % models], number) for number in range(2)]
    found: list[list[list[list[int]]]] = [[], []]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(4):
                found[number].append(call(made[number % models], number))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found == [[alone] * 4 for alone in expected]
