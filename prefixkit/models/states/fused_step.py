"""Tokens of Mamba 2 and of gated delta nets, computed from states that stay in their pool.

transformers' files of models with Mamba 2 have two functions for one token, which run the kernels of ``causal_conv1d``
and ``mamba_ssm`` if these are installed, and else torch code that reads and writes the state a dozen times.  Files of
gated delta nets have functions for one token and for several, with kernels of ``fla``.  Here the module's own
``forward`` runs, and functions that are torch code are replaced by ops, which read each state once from its slot and
write it once to its slot.  The delta rule of few tokens is an op even where ``fla`` is installed: its kernels take a
state that is gathered before and scattered after them, and the host needs longer to launch them than they take.
transformers itself is not modified: the ``forward`` called here is a new function object with the same code, whose
globals name the replacements.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.integrations.accelerate import force_accelerate_hooks

from prefixkit.kv.state_pool import StateTensor
from prefixkit.models.attention_class import original_class
from prefixkit.models.states.fused_functions import DELTA_TOKEN, FUSED_OPS, RECURRENCE, differs

log = logging.getLogger("prefixkit")

Function = Callable[..., Any]
# The code of transformers' decorator of a ``forward``, which runs the hooks of modules whose weights ``forward`` reads.
_HOOKED = force_accelerate_hooks([])(lambda: None).__code__


@dataclass(frozen=True, eq=False)
class FusedStep:
    """What runs one token, or few, of modules of a class.

    Attributes:
        forward: Replaces the class's own ``forward``.
        replaced: By name, the functions of transformers that ops replace.
    """

    forward: Function
    replaced: dict[str, Function]

    def takes(self, state: StateTensor, tokens: int, device: torch.device) -> bool:
        """Whether a state may stay in its pool while a number of tokens of each row run."""
        return any(FUSED_OPS[name].takes(state) and FUSED_OPS[name].runs(tokens, device) for name in self.replaced)


def fused_step(module: nn.Module, tokens: int, device: torch.device) -> FusedStep | None:
    """The fused step of a module whose states stay in their pool while ``tokens`` of each row run; None if the module's
    own code must run, as it must while gradients are enabled.
    """
    found = _fused(original_class(module))  # type: ignore[arg-type]  # classes hash
    if not isinstance(found, FusedStep) or torch.is_grad_enabled() or any(map(_by_hub, found.replaced.values())):
        return None
    return found if any(FUSED_OPS[name].runs(tokens, device) for name in found.replaced) else None


def log_fused(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Log for each class of Mamba 2 or gated delta nets among a model's modules what runs one token, or few."""
    for cls in dict.fromkeys(map(original_class, modules)):
        found = _fused(cls)  # type: ignore[arg-type]
        if isinstance(found, FusedStep):
            most = max(FUSED_OPS[name].most_tokens.get(device.type, 1) for name in found.replaced)
            tokens = "single tokens" if most == 1 else f"up to {most} tokens of a row"
            log.info("%s: states of %s stay in their pool on %s, by ops", cls.__name__, tokens, device)
        elif found:
            log.info("%s: single tokens run by transformers' code: %s", cls.__name__, found)


@functools.cache
def _fused(cls: type[nn.Module]) -> FusedStep | str:
    """The fused step of a class, or the reason why its own code runs; "" if it does not call these functions."""
    own = inspect.unwrap(cls.forward)
    if not isinstance(own, FunctionType) or not {RECURRENCE, DELTA_TOKEN} & set(own.__code__.co_names):
        return ""
    if getattr(cls.forward, "__code__", None) not in (own.__code__, _HOOKED):
        return "its forward is wrapped in another way"
    used = {name: own.__globals__.get(name) for name in FUSED_OPS if name in own.__code__.co_names}
    replaced = dict[str, Function]()
    for name, of in used.items():
        torchs, runs = (None, False) if of is None else _torchs(of)
        if of is not None and torchs is not None and (runs or FUSED_OPS[name].over_kernels):
            if how := differs(name, torchs):
                return f"{name} {how}"
            replaced[name] = of
    if not replaced:
        return "kernels are installed"
    functions = {name: FUSED_OPS[name].replacement(of) for name, of in replaced.items()}
    forward = FunctionType(own.__code__, own.__globals__ | functions, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return FusedStep(force_accelerate_hooks(["conv1d"])(forward), replaced)


def _by_hub(function: Function) -> bool:
    """Whether the package ``kernels`` has replaced a function by a kernel."""
    return isinstance(function, nn.Module) and "forward" in vars(function)


def _torchs(function: Function) -> tuple[Function | None, bool]:
    """The torch code of a function of transformers, and whether the function runs it; None if it cannot be inspected.

    Otherwise the function runs a kernel.
    """
    if isinstance(function, nn.Module):  # made from the function by ``kernels``
        function = inspect.getclosurevars(type(function).forward).nonlocals.get("func", function)
    torchs: Function | None = getattr(function, "__wrapped__", None)
    if torchs is None or not isinstance(function, FunctionType):
        return None, False
    return torchs, inspect.getclosurevars(function).nonlocals.get("implementation") is torchs
