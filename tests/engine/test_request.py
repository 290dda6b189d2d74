"""Requests are checked when they are made, and the message says what to change."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from prefixkit.engine.request import BeamParams, Request, Sample, TokenEvent
from prefixkit.sampling.params import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("n", 0, ValueError, "n must be at least 1, got 0"),
        ("n", True, TypeError, "n must be an integer, got bool"),
        ("n", 2.0, TypeError, "n must be an integer, got float"),
        ("n", np.array([2]), TypeError, "n must be an integer, got ndarray"),
        ("n", torch.tensor(2.0), TypeError, "n must be an integer, got Tensor"),
        ("temperature", -0.1, ValueError, "use 0 to take the likeliest token"),
        ("temperature", 1e-9, ValueError, "use 0 to take the likeliest token"),
        ("temperature", NAN, ValueError, "finite"),
        ("temperature", INF, ValueError, "finite"),
        ("temperature", "hot", TypeError, "temperature must be a number, got str"),
        ("temperature", True, TypeError, "got bool"),
        ("top_k", -1, ValueError, "use 0 to keep every token"),
        ("top_k", 5.0, TypeError, "integer"),
        ("top_p", 0.0, ValueError, r"\(0, 1\], got 0.0; use 1.0"),
        ("top_p", 1.01, ValueError, r"\(0, 1\]"),
        ("top_p", NAN, ValueError, "finite"),
        ("min_p", 1.0, ValueError, r"\[0, 1\)"),
        ("min_p", -0.1, ValueError, r"\[0, 1\)"),
        ("repetition_penalty", 0.0, ValueError, "at least 1e-6, got 0.0; 1.0 is none"),
        ("repetition_penalty", NAN, ValueError, "finite"),
        ("max_new_tokens", 0, ValueError, "at least one token"),
        ("max_new_tokens", False, TypeError, "got bool"),
        ("seed", -1, ValueError, "0 to 2"),
        ("seed", 2**64, ValueError, "at most 18446744073709551615"),
        ("stop_token_ids", 5, TypeError, "must be a list of token ids, got int 5; put a single one into a list"),
        ("stop_token_ids", (-1,), ValueError, "stop_token_ids must be at least 0"),
        ("stop_token_ids", (True,), TypeError, "got bool"),
        ("stop", 7, TypeError, "stop must be a list of strings or functions, got int 7; put a single one into a list"),
        ("stop", ("END", ""), ValueError, "empty string"),
        ("stop", (7,), TypeError, "stop must hold strings or functions, got int"),
        ("stop", (lambda text: True,), TypeError, "must take two arguments, the sample's tokens and their text"),
        ("logits_processors", lambda ids, logits: logits, TypeError, "wrap a processor: lambda: processor"),
    ],
)
def test_sampling_params_are_checked(field, value, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "keep at least one beam"),
        ({"num_beams": True}, TypeError, "got bool"),
        ({"num_beams": 2, "num_return_sequences": 3}, ValueError, "3 of 2 beams; raise num_beams or return fewer"),
        ({"num_beams": 2, "num_return_sequences": 0}, ValueError, "at least one sequence"),
        ({"num_beams": 2, "length_penalty": NAN}, ValueError, "finite"),
        ({"num_beams": 2, "length_penalty": 100.0}, ValueError, "leaves float32; use one nearer to 0"),
        ({"num_beams": 2, "early_stopping": "always"}, ValueError, "True, False or 'never', got 'always'"),
        ({"num_beams": 2, "early_stopping": 1}, ValueError, "got 1"),
        ({"num_beams": 2, "max_new_tokens": 0}, ValueError, "at least one token"),
        ({"num_beams": 2, "stop_token_ids": 5}, TypeError, "put a single one into a list"),
    ],
)
def test_beam_params_are_checked(fields, error, message):
    with pytest.raises(error, match=message):
        BeamParams(**fields)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([], ValueError, "prompt 3: tokens must be a list of at least one id"),
        ("text", TypeError, "prompt 3: tokens must be integers, got text; encode it first"),
        ([[1, 2]], ValueError, r"got shape \[1, 2\]"),
        ([1.0, 2.0], TypeError, "encode the text first"),
        ([True], TypeError, "integers"),
        ([5, -100], ValueError, r"\[0, 2\*\*31\), got -100 to 5; remove padding"),
        ([2**31], ValueError, r"\[0, 2\*\*31\)"),
    ],
)
def test_request_tokens_are_checked(tokens, error, message):
    with pytest.raises(error, match=message):
        Request(3, tokens, SamplingParams())


def test_request_params_are_checked():
    with pytest.raises(TypeError, match="SamplingParams or BeamParams, got dict"):
        Request(0, [1], {"n": 2})
    with pytest.raises(ValueError, match="count prompts from 0"):
        Request(-1, [1], SamplingParams())
    with pytest.raises(ValueError, match="count equal prompts from 0"):
        Request(0, [1], SamplingParams(), -1)


@pytest.mark.parametrize("priority", ["high", 1.5, None, True, float("nan")])
def test_a_priority_is_an_integer(priority):
    """Requests are sorted by it once they are queued."""
    with pytest.raises(TypeError, match="priority must be an integer, got"):
        Request(0, [1], SamplingParams(), priority=priority)
    assert Request(0, [1], SamplingParams(), priority=np.int64(-4)).priority == -4


def test_request_keeps_its_own_tokens():
    mine = np.array([1, 2, 3])
    request = Request(0, mine, SamplingParams())
    mine[0] = 9
    assert request.tokens.dtype == np.int32
    assert request.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        request.tokens[0] = 9


def test_equal_requests_are_equal_however_they_were_written():
    plain = SamplingParams(n=2, temperature=1.0, stop_token_ids=(5, 6), stop=("a", "b"))
    other = SamplingParams(n=np.int64(2), temperature=1, stop_token_ids=[5, np.int32(6), 5], stop=["a", "b", "a"])
    assert plain == other
    assert hash(plain) == hash(other)
    assert type(other.n) is int
    assert type(other.temperature) is float
    assert BeamParams(2, length_penalty=1, stop_token_ids=[3]) == BeamParams(2, length_penalty=1.0, stop_token_ids=(3,))


def test_a_function_that_ends_samples_needs_no_hash():
    class After(list):
        def __call__(self, tokens, text):
            return len(tokens) in self

    assert SamplingParams(stop=[After([2]), "a", After([2]), After([3])]).stop == (After([2]), "a", After([3]))


def test_whatever_is_an_integer_counts_as_one():
    assert SamplingParams(seed=torch.tensor(3), n=np.array(2), top_k=np.uint8(4)) == SamplingParams(
        seed=3, n=2, top_k=4
    )


def test_a_sample_is_read_as_lists_and_held_as_arrays():
    tokens, logprobs = list(range(50_000, 51_000)), [-float(i) / 4 for i in range(1000)]
    sample = Sample(0, 0, tokens, logprobs, "", "stop")
    assert (sample.tokens, sample.logprobs) == (tokens, logprobs)
    assert {type(sample.tokens[0]), type(sample.logprobs[0])} == {int, float}
    assert sum(value.nbytes for value in vars(sample).values() if isinstance(value, np.ndarray)) == 8 * 1000
    assert sample == Sample(0, 0, tuple(tokens), np.array(logprobs), "", "stop") == pickle.loads(pickle.dumps(sample))
    assert dataclasses.asdict(sample)["tokens"] == tokens
    sample.tokens.append(1)
    assert sample.tokens == tokens, "a list of its own at each access"
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.tokens = []


def test_temperature_0_is_greedy():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


@pytest.mark.parametrize(
    "value",
    [
        SamplingParams(),
        BeamParams(2),
        Request(0, [1], BeamParams(2)),
        Sample(0, 0, [], [], "", "stop"),
        TokenEvent(0, 0, 1, 0.0),
    ],
)
def test_values_are_frozen(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 1)
