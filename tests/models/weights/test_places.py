"""Where a model's tensors lie, which its CUDA graphs read there."""

from __future__ import annotations

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
