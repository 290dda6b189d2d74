"""What every call needs to know of a model: what it names its cache, where its logits are, what it does at random."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

# The keywords under which models and their layers take a cache: ``cache`` since transformers 5.24.  Before that models
# without attention took ``cache_params``, and all others, as code of models from a hub still does, ``past_key_values``.
CACHE_KEYWORDS = ("past_key_values", "cache", "cache_params")
# The keyword of most models of the installed transformers, and the field of their outputs.
CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in CACHE_KEYWORDS)


@cache
def keywords(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters of a class's ``forward``."""
    return frozenset(inspect.signature(forward).parameters)


def cache_keyword(forward: Callable[..., Any]) -> str:
    """The keyword for the cache in the ``forward`` of a class."""
    return next((name for name in CACHE_KEYWORDS if name in keywords(forward)), CACHE)


def name_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of a model's layer, with the cache as ``cache``, for functions that replace its code."""
    return {"cache" if name in CACHE_KEYWORDS else name: value for name, value in kwargs.items()}


def logits_of(output: Any) -> Tensor | None:
    """The logits among what a model has returned; None if it has none."""
    logits: Tensor | None = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    return logits


def no_lm_head(model: nn.Module) -> str:
    """The error message for a model that is to sample or score but returns no logits of next tokens."""
    return (
        f"{type(model).__name__} has no language-model head, so that it neither samples nor scores; load it with "
        "AutoModelForCausalLM, or ask for what a head makes of its hidden states: session.values()"
    )


def random_part(model: nn.Module) -> str | None:
    """The name of the part of a model that drops values at random in training mode; None if no part does now."""
    if not model.training:
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return str(name)
        for what, rate in vars(module).items():  # for functional dropout, and layers that are skipped
            if "drop" in what and isinstance(rate, float) and rate > 0:
                return f"{name}.{what}"
    return None
