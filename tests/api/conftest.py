"""The model that these tests share."""

import pytest

import prefixkit
from prefixkit.testing.tiny import tiny_llama


@pytest.fixture(scope="package")
def model():
    return prefixkit.patch(tiny_llama())
