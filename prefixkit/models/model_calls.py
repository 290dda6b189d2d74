"""What every call needs to know of a model: which part drops values at random, and where its logits are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


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
