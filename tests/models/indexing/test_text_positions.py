"""What a model that keeps positions in its cache finds there."""

from __future__ import annotations

import pytest
import torch

from prefixkit.models.indexing.text_positions import ShownLayers, text_positions


class Text:
    """A cache of ``count`` tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def positions(self) -> torch.Tensor:
        return text_positions(self.count, torch.device("cpu"))


def test_each_layer_shows_the_positions_of_a_text_whatever_is_put_there() -> None:
    text = Text(3)
    layers = ShownLayers(text.positions)
    assert layers[0].indexer_position_ids.tolist() == [[[0, 1, 2]]] * 3
    layers[5].indexer_position_ids = torch.zeros(3, 1, 9)
    text.count = 2
    assert layers[5].indexer_position_ids.tolist() == [[[0, 1]]] * 3


def test_nothing_else_is_kept_in_a_layer() -> None:
    text = Text(1)
    layers = ShownLayers(text.positions)
    assert not [*layers]
    assert not hasattr(layers[0], "keys")
    with pytest.raises(AttributeError, match="does not keep 'keys'"):
        layers[0].keys = torch.zeros(1)
