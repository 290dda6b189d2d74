"""A model under grammars, and its session."""

from __future__ import annotations

import pytest

import prefixkit
from tests.integrations.constrained import merging_tokenizer, padded_model


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return padded_model(tokenizer)


@pytest.fixture(scope="module")
def session(model, tokenizer):
    with prefixkit.Session(model, tokenizer, kv_budget="16MiB") as session:
        yield session
