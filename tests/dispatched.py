"""Models whose layers lie on two devices, by accelerate's hooks."""

from __future__ import annotations

from accelerate import dispatch_model
from torch import nn
from transformers import PreTrainedModel


def dispatched(model: PreTrainedModel, first: str, second: str, *, alternate: bool = False) -> PreTrainedModel:
    """The model with its weights on two devices, as ``device_map="auto"`` lays them in the order of its modules.

    The first half of the layers goes to the first device; with ``alternate`` every second layer does.
    """
    body, places = model.base_model, dict[str, str]()
    prefix, place = model.base_model_prefix, first
    for name, child in body.named_children():
        if not isinstance(child, nn.ModuleList):
            places[f"{prefix}.{name}"] = place
            continue
        for number in range(len(child)):
            on_second = number % 2 if alternate else number >= len(child) // 2
            places[f"{prefix}.{name}.{number}"] = second if on_second else first
        place = second
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    places |= {name: first if tied else second for name, child in model.named_children() if child is not body}
    skipped = model._skip_keys_device_placement
    made: PreTrainedModel = dispatch_model(model, places, main_device=first, skip_keys=skipped)
    return made
