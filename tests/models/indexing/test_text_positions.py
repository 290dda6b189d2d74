"""What a model that keeps positions in its cache finds there."""

from __future__ import annotations

import pytest
import torch

from prefixkit.models.indexing.text_positions import ShownLayers, text_positions


def test_each_layer_shows_the_positions_of_a_text_whatever_is_put_there() -> None:
    count = 3
    layers = ShownLayers(lambda: text_positions(count, torch.device("cpu")))
    assert layers[0].indexer_position_ids.tolist() == [[[0, 1, 2]]] * 3
    layers[5].indexer_position_ids = torch.zeros(3, 1, 9)
    count = 2
    assert layers[5].indexer_position_ids.tolist() == [[[0, 1]]] * 3


def test_nothing_else_is_kept_in_a_layer() -> None:
    layers = ShownLayers(lambda: text_positions(1, torch.device("cpu")))
    assert not [*layers]
    assert not hasattr(layers[0], "keys")
    with pytest.raises(AttributeError, match="does not keep 'keys'"):
        layers[0].keys = torch.zeros(1)
