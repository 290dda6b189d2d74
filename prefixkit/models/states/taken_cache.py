"""The cache that a model accepts: its keyword, its class where a model has one of its own, and what comes with it."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from prefixkit.models import requirements
from prefixkit.models.attention_class import argument_names, original_class


def cache_keyword(model: nn.Module) -> str:
    """The keyword for the cache in a model's ``forward``."""
    return requirements.cache_keyword(argument_names(model))


def has_attention(model: nn.Module) -> bool:
    """Whether a model has attention layers.  One that keeps states alone takes no positions, and ``generate()`` passes
    it a mask with its prompts only.
    """
    return not getattr(original_class(model), "_is_stateful", False) or "position_ids" in argument_names(model)


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache for a model: of the model's own class if an annotation in its body names one, else the usual one."""
    try:
        hints = typing.get_type_hints(inspect.unwrap(original_class(model.base_model).forward))
    except (NameError, TypeError):  # annotations with undefined names
        hints = {}
    hint = hints.get(cache_keyword(model.base_model))
    own = [one for one in typing.get_args(hint) if isinstance(one, type) and issubclass(one, DynamicCache)]
    if own and own[0] is not DynamicCache:
        return own[0]()
    return DynamicCache(config=model.config.get_text_config())


def step_inputs(model: nn.Module, cache: Cache, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a step: models without attention may accept no positions, and name the cache otherwise."""
    if not has_attention(model):
        names = argument_names(model)
        given = {name: value for name, value in given.items() if name in names}
    return {cache_keyword(model): cache, **given}
