"""Mixtures of experts in prefixkit's steps: products that read on the GPU which rows are whose.

transformers' own experts (``transformers/integrations/moe.py``) are a loop that asks the host which experts have rows,
or a grouped product for which the host waits too, but in bfloat16 on GPUs of compute capability 9.0 and 10.0.  On
these it is faster where experts have many rows, and such steps leave experts to it.
Here rows stay in their order, and ``expert_product`` finds those of each expert: no sort, no gather, no wait, so that
CUDA graphs hold the step.  Only the class of the experts' modules changes, as in ``attention_class.py``, and only steps
that prefixkit runs take this way; router, activation and weights are the model's.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.models.attention_class import subclass
from prefixkit.ops.backend import backend_for

log = logging.getLogger("prefixkit")

# For tests and comparisons, read when a session is made: up to how many pairs of an expert, on average, the op runs
# experts on any device; ``model`` for 0 and ``ops`` for any.
VARIABLE = "PREFIXKIT_EXPERTS"
# What transformers' decorator of experts' classes gives their modules.
_DECORATED = ("has_gate", "has_bias", "is_transposed", "num_experts", "config", "_apply_gate")
# Its default, and its loop; any other choice is the user's.
_REPLACED = ("grouped_mm", "eager")
# What configurations call the number of experts of a token.
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
# Whether a step is in progress in this thread whose experts the op serves.
_serving = ContextVar("_serving", default=False)


@contextmanager
def experts_by_ops() -> Iterator[None]:
    """For the length of a step of this thread, run patched experts by the op, where they fit it."""
    token = _serving.set(True)
    try:
        yield
    finally:
        _serving.reset(token)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _by_ops() -> bool:
    return _serving.get()


def most_rows(modules: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> float:
    """Of how many rows a step may be whose experts, among a model's modules, run by the op; 0 if there are none."""
    found: list[Any] = expert_modules(modules)
    if not found:
        return 0
    config, limit, wanted = found[0].config, backend_for(device).expert_pairs, os.environ.get(VARIABLE)
    pairs = 0 if limit is None else limit(device, dtype)
    if wanted:
        pairs = float({"model": "0", "ops": "inf"}.get(wanted, wanted))
    elif pairs and config._experts_implementation == "eager":
        pairs = math.inf  # the host waits for the loop
    experts: int = min(module.num_experts for module in found)
    numbers = [getattr(config, name, None) for name in _PER_TOKEN]
    return pairs * experts / next((number for number in numbers if isinstance(number, int)), experts)


def log_experts(modules: list[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
    """Say once what runs the experts among the modules of a model on a GPU, if it has any."""
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
    """Those modules that hold experts' weights and take transformers' interface for them, patched or not."""
    return [
        module
        for module in modules
        if all(hasattr(module, name) for name in _DECORATED) and all(_is_matrix(weight) for weight in _matrices(module))
    ]


@functools.cache
def experts_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an experts' class that runs by the op in prefixkit's steps; one for each original."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _by_ops() and not kwargs and len(args) == 3 and _fits(self, *args):
            return _run(self, *args)
        return original.forward(self, *args, **kwargs)  # looked up at each call, as in attention_class.py

    return subclass(original, _blank, {"forward": forward})


def _blank(original: type[nn.Module]) -> nn.Module:
    cls = experts_class(original)  # type: ignore[arg-type]  # classes hash
    return cls.__new__(cls)


def _matrices(module: Any) -> tuple[Any, Any]:
    """The first product's weights and the second's."""
    first = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    return first, getattr(module, "down_proj", None)


def _is_matrix(weight: object) -> bool:
    """Whether it is a parameter of one matrix for each expert, or what a process holds a part of."""
    split = type(weight).__module__.startswith("torch.distributed.")
    return isinstance(weight, nn.Parameter) and (split or type(weight) is nn.Parameter) and weight.ndim == 3


def _fits(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> bool:
    """Whether the op takes this call of an experts' module, and no choice of the user's is overruled."""
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
    # As transformers does it: products in the dtype of both, their sum in float32.
    weighted: Tensor = out * weights.reshape(-1, 1)
    return weighted.view(tokens, per_token, -1).sum(dim=1).to(hidden.dtype)


def _bias(module: Any, *names: str) -> Tensor | None:
    if not module.has_bias:
        return None
    bias: Tensor = next(getattr(module, name) for name in names if hasattr(module, name))
    return bias
