"""Where a model's tensors lie, which its CUDA graphs read there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixkit.models.weights.content import kv_version
from prefixkit.models.weights.state import weights_places
from prefixkit.testing.tiny import tiny_llama


def test_a_tensor_that_a_module_stores_as_a_plain_attribute() -> None:
    """A graph reads the tensor that the attribute was, whose memory may be another's once it is replaced."""
    model = tiny_llama()
    model.model.norm.bias_by_hand = torch.zeros(64)
    places = weights_places(model)
    model.model.norm.bias_by_hand += 1.0
    assert weights_places(model) == places, "it is read where it was"
    before, model.model.norm.bias_by_hand = model.model.norm.bias_by_hand, torch.zeros(64)
    assert before is not None and weights_places(model) != places


def test_what_a_call_stores_for_the_next_is_no_weight() -> None:
    """Models of images and text store an offset of positions; with each new one, graphs would be captured again."""
    model = tiny_llama()
    model.model.rope_deltas = torch.zeros(2, 1)
    places, version = weights_places(model), kv_version(model)
    kept, model.model.rope_deltas = model.model.rope_deltas, torch.ones(2, 1)
    assert kept is not None
    assert (weights_places(model), kv_version(model)) == (places, version)


def test_a_forward_that_a_module_or_its_class_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the kernels that the earlier one has launched."""
    model = tiny_llama()
    mlp, places = model.model.layers[0].mlp, weights_places(model)
    for owner in (mlp, type(mlp)):
        with monkeypatch.context() as change:
            change.setattr(owner, "forward", lambda *args: args[-1])
            assert weights_places(model) != places
        assert weights_places(model) == places


@pytest.mark.parametrize("backend", [torch.backends.cuda, torch.backends.mkldnn], ids=["cuda", "mkldnn"])
def test_the_precision_of_products_in_float32(backend: Any) -> None:
    """KV of the other precision is not used either."""
    model, before = tiny_llama(), backend.matmul.fp32_precision
    places, version = weights_places(model), kv_version(model)
    try:
        backend.matmul.fp32_precision = "tf32"
        assert weights_places(model) != places and kv_version(model) != version
    finally:
        backend.matmul.fp32_precision = before
    assert (weights_places(model), kv_version(model)) == (places, version)
