"""Norms by the root mean square in prefixkit's steps: one kernel in place of about ten.

torch.compile does this where it compiles layers (``compile/layers.py``), but it compiles no model with layers that keep
states.  In such a model, steps of few tokens take the time of launching kernels, a third of which compute norms.  Only
the class of the norms' modules changes, as in ``attention_class.py``, and only prefixkit's steps run this code.  What a
class computes is measured: a norm that is not one of these stays as it is.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import prefixkit.ops.library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.models.attention_class import original_class
from prefixkit.models.bound_forwards import subclass
from prefixkit.ops.arguments import FLOATS
from prefixkit.threads import set_within

log = logging.getLogger("prefixkit")

_FORM = "_prefixkit_norm"  # of patched classes: what they compute
_EPSILONS = ("eps", "variance_epsilon")  # attributes that hold epsilon
# Whether this thread is running a step in which the op runs norms.
_serving = ContextVar("_serving_norms", default=False)


@dataclass(frozen=True)
class Norm:
    """What a norm computes: ``x / sqrt(mean(x * x) + eps) * (weight + offset)``.

    Attributes:
        epsilon: The attribute that holds ``eps``.
        offset: 1 if weights are differences from 1, else 0.
        gated: Whether a second argument follows, whose ``silu`` is a factor.
    """

    epsilon: str
    offset: float
    gated: bool


def norms_by_ops() -> AbstractContextManager[None]:
    """While this thread runs a step in this context, run patched norms by the op."""
    return set_within(_serving, True)


def log_norms(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Log which norms among a model's modules are patched, for a model that has such."""
    patched = [module for module in modules if _FORM in vars(type(module))]
    if patched:
        log.info("%d norms run by prefixkit's rms_norm on %s", len(patched), device)


def norm_modules(modules: Iterable[nn.Module]) -> dict[nn.Module, Norm]:
    """The norms among some modules that the op computes, patched or not."""
    found, known = dict[nn.Module, Norm](), dict[Any, Norm | None]()
    for module in modules:
        epsilon = next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)
        weight = module._parameters.get("weight")
        if epsilon is None or len(module._parameters) != 1 or module._modules or module._buffers:
            continue
        if type(weight) is not nn.Parameter or weight.ndim != 1:
            continue
        plain = {name: value for name, value in vars(module).items() if isinstance(value, str | int)}
        key = original_class(module), epsilon, *sorted(plain.items())
        if key not in known:
            known[key] = _measured(module, epsilon, len(weight))
        if (norm := known[key]) is not None:
            found[module] = norm
    return found


def _measured(module: nn.Module, epsilon: str, size: int) -> Norm | None:
    """What a module computes, found on random numbers; None if the op does not compute it."""
    generator = torch.Generator("cpu").manual_seed(0)
    x, gate, weight = (
        torch.randn(of, generator=generator, dtype=torch.float32, device="cpu")
        for of in ((3, size), (3, size), (size,))
    )
    alike = copy.copy(module)
    alike.__dict__["_parameters"] = {"weight": nn.Parameter(weight, requires_grad=False)}
    alike.__dict__[epsilon] = 0.1  # large enough to be seen
    for gated, offset in itertools.product((False, True), (0.0, 1.0)):
        norm, given = Norm(epsilon, offset, gated), (x, gate) if gated else (x,)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                wanted, got = original_class(module).forward(alike, *given), _run(alike, norm, *given)
                if wanted.shape == got.shape and torch.allclose(wanted, got, rtol=1e-4, atol=1e-5):
                    return norm
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
                continue  # it takes something else
    return None


@functools.cache
def norms_class(original: type[nn.Module], norm: Norm) -> type[nn.Module]:
    """The subclass of a norm's class that calls the op in prefixkit's steps; one subclass per original class."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _serving.get() and not kwargs and _fits(self, norm, args):
            return _run(self, norm, *args)
        return original.forward(self, *args, **kwargs)  # looked up at each call, as in attention_class.py

    return subclass(original, norms_class, {"forward": forward, _FORM: norm}, norm)


def _fits(module: Any, norm: Norm, args: tuple[Any, ...]) -> bool:
    """Whether the op supports this call of a norm."""
    weight = module.weight
    return (
        len(args) == 1 + norm.gated
        and args[0].shape[-1:] == weight.shape
        and all(isinstance(of, Tensor) and of.dtype == weight.dtype and of.shape == args[0].shape for of in args)
        and weight.dtype in FLOATS
        and type(weight) is nn.Parameter
        and not torch.is_autocast_enabled(weight.device.type)
    )


def _run(module: Any, norm: Norm, x: Tensor, gate: Tensor | None = None) -> Tensor:
    made: Tensor = torch.ops.prefixkit.rms_norm(x, module.weight, gate, getattr(module, norm.epsilon), norm.offset)
    return made
