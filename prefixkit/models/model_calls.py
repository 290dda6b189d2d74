"""What every call of a model asks: what it drops at random, and where its logits are."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from prefixkit.models.attention_class import original_class


def logits_of(output: Any) -> Tensor | None:
    """The logits among what a model has returned; None if it has none."""
    logits: Tensor | None = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    return logits


def random_part(model: nn.Module) -> str | None:
    """The name of what a model in training mode drops at random; None if nothing, or in evaluation mode."""
    if not model.training:
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return str(name)
        for what, rate in vars(module).items():  # for functional dropout, and layers that are left out
            if "drop" in what and isinstance(rate, float) and rate > 0:
                return f"{name}.{what}"
    return None


def cache_keyword(model: nn.Module) -> str:
    """The keyword of a model's ``forward`` that takes a cache: models without attention have another."""
    names = inspect.signature(original_class(model).forward).parameters
    return "cache_params" if "cache_params" in names and "past_key_values" not in names else "past_key_values"


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache for a model: of the class of its own that its body takes by its annotation, else the usual one."""
    try:
        hint = typing.get_type_hints(inspect.unwrap(original_class(model.base_model).forward)).get("past_key_values")
    except (NameError, TypeError):  # annotations that name what is not there
        hint = None
    own = [one for one in typing.get_args(hint) if isinstance(one, type) and issubclass(one, DynamicCache)]
    if own and own[0] is not DynamicCache:
        return own[0]()
    return DynamicCache(config=model.config.get_text_config())
