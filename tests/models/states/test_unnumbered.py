"""The layers of modules that are not told of theirs when they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefixkit.models.states.unnumbered import numbers_by_place

pytestmark = pytest.mark.skipif(not Path("scripts/tiny_models.py").exists(), reason="needs the repository's scripts")


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_attention_that_shares_its_weights_has_the_number_that_each_call_brings(family: str) -> None:
    from scripts.tiny_models import tiny_config, tiny_model

    model = tiny_model(tiny_config(family), "")
    numbers, brought = numbers_by_place(model), {}
    for name in numbers:

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            brought[name] = kwargs["layer_idx"]

        model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(3, 9)[None])
    assert sorted(numbers.values()) == [1, 3]
    assert brought == numbers
    weights = {model.get_submodule(name).q_proj.weight.data_ptr() for name in numbers}
    assert len(weights) == 1


def test_recurrent_blocks_have_the_numbers_of_their_layers() -> None:
    from scripts.tiny_models import tiny_config, tiny_model

    model = tiny_model(tiny_config("recurrent_gemma"), "")
    assert numbers_by_place(model) == {f"model.layers.{at}.temporal_block": at for at in (0, 1)}


def test_modules_that_know_their_layer_are_left_out() -> None:
    from scripts.tiny_models import tiny_config, tiny_model

    assert numbers_by_place(tiny_model(tiny_config("jamba"), "")) == {}
