"""Mixtures of experts in prefixkit's steps: matrix products that read each row's experts on the GPU.

transformers' own experts (``transformers/integrations/moe.py``) run as a loop or as a grouped product.  The loop makes
the host wait to learn which experts have rows.  So does the grouped product, except in bfloat16 on GPUs of compute
capability 9.0 and 10.0, where it is faster if experts have many rows; such steps run the grouped product.
In other steps rows stay in their order, and ``expert_product`` finds the rows of each expert without a sort, a gather
or a wait of the host, so CUDA graphs can capture the step.  Only the class of the experts' modules changes, as in
``attention_class.py``, and only prefixkit's steps run this code; router, activation and weights are the model's.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.models.bound_forwards import subclass
from prefixkit.ops.backend import backend_for
from prefixkit.threads import set_within

log = logging.getLogger("prefixkit")

# For tests and comparisons, read when a session is made: the largest average number of (row, expert) pairs per expert
# for which the op runs experts, on any device; ``model`` means 0 and ``ops`` means no limit.
VARIABLE = "PREFIXKIT_EXPERTS"
# Attributes that transformers' decorator of experts' classes sets on their modules.
_DECORATED = ("has_gate", "has_bias", "is_transposed", "num_experts", "config", "_apply_gate")
# Implementations that the op may replace: transformers' default, and its loop.  The user has chosen any other.
_REPLACED = ("grouped_mm", "eager")
# Names of the number of experts per token in configs.
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
# Whether this thread is running a step in which the op runs the experts.
_serving = ContextVar("_serving", default=False)


def experts_by_ops() -> AbstractContextManager[None]:
    """While this thread runs a step in this context, run patched experts by the op where it supports them."""
    return set_within(_serving, True)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _by_ops() -> bool:
    return _serving.get()


def most_rows(modules: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> float:
    """The most rows of a step in which the op runs the experts among a model's modules; 0 if it has no experts."""
    found: list[Any] = expert_modules(modules)
    if not found:
        return 0
    config, limit, wanted = found[0].config, backend_for(device).expert_pairs, os.environ.get(VARIABLE)
    pairs = 0 if limit is None else limit(device, dtype)
    if wanted:
        pairs = float({"model": "0", "ops": "inf"}.get(wanted, wanted))
    elif pairs and config._experts_implementation == "eager":
        pairs = math.inf  # the loop makes the host wait
    experts: int = min(module.num_experts for module in found)
    numbers = [getattr(config, name, None) for name in _PER_TOKEN]
    return pairs * experts / next((number for number in numbers if isinstance(number, int)), experts)


def log_experts(modules: list[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
    """Log what runs the experts among the modules of a model on a GPU, if it has experts."""
    if device.type != "cuda" or not (found := expert_modules(modules)):
        return
    config: Any = found[0].config
    chosen, most = config._experts_implementation, most_rows(modules, device, dtype)
    if chosen not in _REPLACED or not most:
        log.info("experts run by transformers' %r", chosen)
    else:
        where = (
            "" if most == math.inf else f" in steps of up to {int(most)} rows, by transformers' {chosen!r} in others"
        )
        log.info("experts run by prefixkit's products%s", where)


def expert_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that hold experts' weights and follow transformers' interface for experts, patched or not."""
    return [
        module
        for module in modules
        if all(hasattr(module, name) for name in _DECORATED) and all(_is_matrix(weight) for weight in _matrices(module))
    ]


@functools.cache
def experts_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an experts' class that calls the op in prefixkit's steps; one subclass per original class."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _by_ops() and not kwargs and len(args) == 3 and _fits(self, *args):
            return _run(self, *args)
        return original.forward(self, *args, **kwargs)  # looked up at each call, as in attention_class.py

    return subclass(original, experts_class, {"forward": forward})


def _matrices(module: Any) -> tuple[Any, Any]:
    """The weights of the first product and those of the second."""
    first = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    return first, getattr(module, "down_proj", None)


def _is_matrix(weight: object) -> bool:
    """Whether ``weight`` is a parameter with one matrix per expert, whole or split over processes."""
    split = type(weight).__module__.startswith("torch.distributed.")
    return isinstance(weight, nn.Parameter) and (split or type(weight) is nn.Parameter) and weight.ndim == 3


def _fits(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> bool:
    """Whether the op supports this call of an experts' module, and the user has chosen no other implementation."""
    return (
        module.config._experts_implementation in _REPLACED
        and hidden.ndim == index.ndim == 2
        and index.dtype == torch.int64
        and all(
            matrix.dtype == hidden.dtype and not matrix.shape[1] % 8 and not matrix.shape[2] % 8
            for matrix in _matrices(module)
        )
    )


def _run(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]``, as the experts' forward returns; ``index`` and ``weights`` are ``[tokens, per token]``."""
    first, second = (matrix if module.is_transposed else matrix.transpose(1, 2) for matrix in _matrices(module))
    index = index.contiguous()
    tokens, per_token = index.shape
    inner = torch.ops.prefixkit.expert_product(
        hidden, first, _bias(module, "gate_up_proj_bias", "up_proj_bias"), index, per_token
    )
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = torch.ops.prefixkit.expert_product(inner, second, _bias(module, "down_proj_bias"), index, 1)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    # As in transformers: products in the dtype that both factors promote to, their sum in float32.
    weighted: Tensor = out * weights.reshape(-1, 1)
    return weighted.view(tokens, per_token, -1).sum(dim=1).to(hidden.dtype)


def _bias(module: Any, *names: str) -> Tensor | None:
    if not module.has_bias:
        return None
    bias: Tensor = next(getattr(module, name) for name in names if hasattr(module, name))
    return bias
