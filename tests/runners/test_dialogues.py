"""Calls that go on from earlier samples, by graphs: the pool holds what the tree says, and samples are as if alone."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixkit.engine.request import BeamParams, Request
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.runners.batch import Pace
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, assert_all_given_back, beams_alone
from prefixkit.testing.fake_model import make_engine
from tests.engine.integrity import check_engine
from tests.runners.stand_ins import Capturing, RoomyPlanning, graph_runner

RUNS = int(os.environ.get("PREFIXKIT_SOAK_RUNS", "10"))
Params = SamplingParams | BeamParams


class Dialogues:
    """A session's engine, of drawn sizes and paces, and what has been said in it."""

    def __init__(self, rng: np.random.Generator, page_size: int) -> None:
        self.rng, self.places = rng, 0
        self.known = [tuple(self.tokens(5))]
        self.made, self.model = make_engine(
            self.one_of(60, 200, 4096),
            page_size,
            retain_samples=True,
            prefill_chunk=self.one_of(7, 1024),
            most_running=self.one_of(3, 8, 1000),
        )
        self.made.runner = graph_runner(
            self.made,
            self.model,
            Capturing(where=lambda: self.places),
            RoomyPlanning,
            pace=Pace(ahead=self.one_of(2, 3), slack=self.one_of(1, 2, 16), waited_for=8),
            short=self.one_of(0, 4096),
            fewest_steps=self.one_of(1, 4),
            weights=lambda *_: self.places,
            moves=lambda: self.places,
        )
        self.made.runner.replan_every = self.one_of(3, 64)

    def one_of(self, *choices: int) -> int:
        return int(self.rng.choice(choices))

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, 3, count).tolist()  # so few different ones that texts share many

    def prompt(self) -> np.ndarray[Any, Any]:
        """A known text, or its beginning, and some tokens more."""
        text = self.known[self.rng.integers(len(self.known))]
        keep = len(text) if self.rng.random() < 0.6 else int(self.rng.integers(1, len(text) + 1))
        return np.array([*text[:keep], *self.tokens(self.one_of(0, 1, 3))][:60])

    def params(self) -> Params:
        stop = (3, 4) if self.rng.random() < 0.5 else ()
        if self.rng.random() < 0.1:
            return BeamParams(num_beams=self.one_of(1, 3), max_new_tokens=self.one_of(2, 9), stop_token_ids=stop)
        most, given = int(self.rng.integers(1, 20)), SamplingParams(seed=self.one_of(*range(50)), stop_token_ids=stop)
        given = replace(given, n=self.one_of(1, 2, 4), max_new_tokens=most)
        if self.rng.random() < 0.1:
            given = replace(given, logits_processors=lambda: unchanged)
        return replace(given, stop=(goes_on,)) if self.rng.random() < 0.1 else given

    def call(self) -> None:
        """A call of some requests, during which weights may move, as a callback does it."""
        requests = [Request(i, self.prompt(), self.params()) for i in range(self.one_of(1, 2, 4))]
        moves = self.rng.random() < 0.2

        def step(rows: int) -> None:
            self.places += bool(moves and self.rng.random() < 0.2)

        self.made.options["on_step"] = step
        self.made.options["on_token"] = (lambda event: None) if self.rng.random() < 0.2 else None
        try:
            samples = self.made.run(requests)
        except KVBudgetTooSmall:
            return
        check_engine(self.made, self.model)
        for sample in samples:
            asked = requests[sample.prompt_index]
            assert list(sample.tokens) == expected(asked, sample.index), (asked, sample.index)
            self.known.append((*asked.tokens.tolist(), *sample.tokens))
        self.known = self.known[-12:]


def unchanged(tokens: Any, logits: Any) -> Any:
    return logits


def goes_on(tokens: list[int], text: str) -> bool:
    return False


def expected(request: Request, index: int) -> list[int]:
    if isinstance(request.params, BeamParams):
        return list(beams_alone(request.tokens, request.params)[index].tokens)
    return alone(request.tokens, request.params, index)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_texts_that_go_on_find_their_own_kv(page_size: int) -> None:
    for seed in np.random.SeedSequence().generate_state(RUNS).tolist():
        print("seed", seed)
        dialogues = Dialogues(np.random.default_rng(seed), page_size)
        for _ in range(5):
            dialogues.call()
        assert_all_given_back(dialogues.made)
