"""A call of many samples does not have the garbage collector visit what lived before it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from prefixkit.engine.call import Call
from prefixkit.engine.frozen_heap import MANY
from prefixkit.engine.request import Request
from prefixkit.models import patch
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.tiny import tiny_llama


@pytest.fixture
def thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def frozen_during(samples: int) -> list[int]:
    """How many objects are frozen when the samples of a call end."""
    asked, counts = [Request(0, np.arange(5, 9), SamplingParams(n=samples, max_new_tokens=1))], list[int]()
    engine = make_engine(patch(tiny_llama()), asked)
    engine.run(asked, Call(on_sample=lambda sample: counts.append(gc.get_freeze_count())))
    return counts


def test_what_lived_before_a_call_of_many_samples_is_frozen_until_its_end(thawed: None):
    assert min(frozen_during(MANY)) > 0
    assert gc.get_freeze_count() == 0


def test_a_call_of_few_samples_freezes_nothing(thawed: None):
    assert frozen_during(MANY - 1) == [0] * (MANY - 1)


def test_what_the_program_has_frozen_stays_frozen(thawed: None):
    gc.freeze()
    before = gc.get_freeze_count()
    frozen_during(MANY)
    assert 0 < gc.get_freeze_count() <= before
