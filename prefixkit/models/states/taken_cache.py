"""The cache that a model accepts: models without attention name it otherwise, some have a cache class of their own."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from prefixkit.models.attention_class import argument_names, original_class


def cache_keyword(model: nn.Module) -> str:
    """The keyword for the cache in a model's ``forward``: models without attention use another name."""
    names = argument_names(model)
    return "cache_params" if "cache_params" in names and "past_key_values" not in names else "past_key_values"


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache for a model: of the model's own class if an annotation in its body names one, else the usual one."""
    try:
        hint = typing.get_type_hints(inspect.unwrap(original_class(model.base_model).forward)).get("past_key_values")
    except (NameError, TypeError):  # annotations with undefined names
        hint = None
    own = [one for one in typing.get_args(hint) if isinstance(one, type) and issubclass(one, DynamicCache)]
    if own and own[0] is not DynamicCache:
        return own[0]()
    return DynamicCache(config=model.config.get_text_config())


def step_inputs(model: nn.Module, cache: Cache, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a step: models without attention may accept no positions, and name the cache otherwise."""
    keyword, names = cache_keyword(model), argument_names(model)
    if keyword != "past_key_values":
        given = {name: value for name, value in given.items() if name in names}
    return {keyword: cache, **given}
