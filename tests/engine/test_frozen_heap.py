"""A call of many samples does not have the garbage collector visit what lived before it."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

import prefixkit
from prefixkit.engine.call import Call
from prefixkit.engine.frozen_heap import FEW, MANY
from prefixkit.engine.request import Request
from prefixkit.models import patch
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.tiny import tiny_llama


@pytest.fixture
def thawed():
    """A heap as in a program that freezes nothing; afterwards it is frozen again, as later tests are faster then."""
    gc.unfreeze()
    yield
    gc.freeze()


class Frozen:
    """Counts the objects that are frozen when the last of some samples ends: to count them takes 50 ms."""

    def __init__(self, samples: int) -> None:
        self.left, self.count = samples, -1

    def __call__(self, sample: object) -> None:
        self.left -= 1
        if not self.left:
            self.count = gc.get_freeze_count()


def frozen_during(samples: int) -> int:
    """How many objects are frozen when the samples of a call end."""
    asked, frozen = [Request(0, np.arange(5, 9), SamplingParams(n=samples, max_new_tokens=1))], Frozen(samples)
    make_engine(patch(tiny_llama()), asked).run(asked, Call(on_sample=frozen))
    return frozen.count


def test_what_lived_before_a_call_of_many_samples_is_frozen_until_its_end(thawed: None):
    assert frozen_during(MANY) > 0
    assert gc.get_freeze_count() == 0


def test_a_call_of_few_samples_freezes_nothing(thawed: None):
    assert frozen_during(MANY - 1) == 0


def test_what_python_has_frozen_at_its_start_is_not_taken_for_what_a_program_froze():
    code = "import gc; print(gc.get_freeze_count()); gc.freeze(); print(gc.get_freeze_count())"
    of_python, of_program = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    assert of_python <= FEW < of_program


def test_what_the_program_has_frozen_stays_frozen(thawed: None):
    gc.freeze()
    before = gc.get_freeze_count()
    frozen_during(MANY)
    assert 0 < gc.get_freeze_count() <= before


def test_a_whole_call_thaws_the_heap_at_its_end_alone(thawed: None):
    for prompts in ([[5, 6, 7]], [[5, 6, 7], [5, 6, 8]]):
        frozen, options = Frozen(MANY), {"n": MANY // len(prompts), "max_new_tokens": 1, "stop_token_ids": ()}
        prefixkit.generate(patch(tiny_llama()), None, prompts, **options, on_sample=frozen)
        assert frozen.count > 0
        assert gc.get_freeze_count() == 0
