"""Parameters that are refused."""

import numpy as np
import pytest

import prefixkit
from prefixkit.models import NotPatched
from tests.api.cases import TOKENIZER
from tests.tiny import tiny_llama


def test_a_model_that_is_not_patched():
    with pytest.raises(NotPatched, match=r"prefixkit\.patch\(model\)"):
        prefixkit.generate(tiny_llama(), TOKENIZER, ["a"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": [1, 2]}, "seed"),
        ({"seed": np.array([1, 2])}, "seed must be one integer or one per prompt, got 2 for 1 prompt"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"kv_budget": "2 gigs"}, 'kv_budget: a size must look like "2GiB", .* got "2 gigs"'),
        ({"kv_budget": float("nan")}, "kv_budget"),
        ({"keep": False}, "keep=False drops every sample; pass on_sample"),
    ],
)
def test_parameters_out_of_range(model, option, message):
    with pytest.raises(ValueError, match=message):
        prefixkit.generate(model, TOKENIZER, ["a"], **option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"seed": True}, "seed must be an integer, got bool"),
        ({"seed": 1.5}, "seed must be one integer or one per prompt, got float 1.5"),
        ({"seed": None}, "seed must be one integer or one per prompt, got NoneType None"),
        ({"seed": "7"}, "seed must be one integer or one per prompt, got str '7'"),
        ({"seed": [1.5]}, "seed must be an integer, got float"),
        ({"seed": np.array([1.5])}, "seed must be an integer, got float"),
        ({"seed": np.array([[1]])}, "seed must be an integer, got list"),
        ({"stop": 7}, "stop must be a tuple of strings or functions, got 7"),
        ({"stop": b"END"}, "stop must be a tuple of strings"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a tuple of token ids, got 7"),
        ({"kv_budget": True}, "kv_budget: .* got bool True"),
        ({"kv_budget": [1]}, "kv_budget: .* got list"),
    ],
)
def test_parameters_of_another_type(model, option, message):
    with pytest.raises(TypeError, match=message):
        prefixkit.generate(model, TOKENIZER, ["a"], **option)
