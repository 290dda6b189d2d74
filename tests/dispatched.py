"""Models whose layers lie on two devices, by accelerate's hooks."""

from __future__ import annotations

from accelerate import dispatch_model
from torch import nn
from transformers import PreTrainedModel


def dispatched(model: PreTrainedModel, first: str, second: str, *, alternate: bool = False) -> PreTrainedModel:
    """The model with its weights on two devices, as ``device_map="auto"`` lays them in the order of its modules.

    The first half of the layers goes to the first device; with ``alternate`` every second layer does.  A head that
    shares its weights with the embedding lies beside it.
    """
    (above, body), places, place = _body(model), dict[str, str](), first
    for name, child in body.named_children():
        if not isinstance(child, nn.ModuleList):
            places[f"{above}.{name}"] = place
            continue
        for number in range(len(child)):
            on_second = number % 2 if alternate else number >= len(child) // 2
            places[f"{above}.{name}.{number}"] = second if on_second else first
        place = second
    head = first if model.config.get_text_config().tie_word_embeddings else second
    places |= {name: head for name, child in model.named_children() if child is not body}
    skipped = model._skip_keys_device_placement
    made: PreTrainedModel = dispatch_model(model, places, main_device=first, skip_keys=skipped)
    return made


def _body(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The name and the module below the head that holds the list of layers."""
    return next(
        (name, child)
        for name, child in model.named_children()
        if any(isinstance(part, nn.ModuleList) for part in child.children())
    )
