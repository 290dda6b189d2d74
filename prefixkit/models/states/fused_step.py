"""One token of Mamba 2 from states that stay where they lie in a pool.

transformers' files of models with Mamba 2 have two functions for it, which run the kernels of ``causal_conv1d`` and
``mamba_ssm`` where these are installed.  Else they run torch code that reads and writes the state a dozen times.  Here
the module's own ``forward`` runs with those of the two that are torch code replaced by ops, which read each state once
from its slot and write it once to its slot.  Nothing of transformers changes: the ``forward`` is a function of the same
code that looks other functions up.
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
from prefixkit.models.states.fused_functions import MADE, RECURRENCE, differs

log = logging.getLogger("prefixkit")

Function = Callable[..., Any]
# What transformers' decorator of a ``forward`` makes of it: modules whose weights it reads have their hooks run.
_HOOKED = force_accelerate_hooks([])(lambda: None).__code__


@dataclass(frozen=True, eq=False)
class FusedStep:
    """What runs one token of a class.

    Attributes:
        forward: In place of the class's own.
        replaced: By name, the functions of transformers in whose place ops run.
    """

    forward: Function
    replaced: dict[str, Function]

    def takes(self, state: StateTensor) -> bool:
        """Whether a state may stay in its pool."""
        return any(MADE[name].takes(state) for name in self.replaced)


def fused_step(module: nn.Module) -> FusedStep | None:
    """What runs one token of a module whose states stay in their pool; None where its own code does all, as it does
    where gradients may be wanted.
    """
    found = _fused(original_class(module))  # type: ignore[arg-type]  # classes hash
    if not isinstance(found, FusedStep) or torch.is_grad_enabled() or any(map(_by_hub, found.replaced.values())):
        return None
    return found


def log_fused(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Say once for each class of Mamba 2 among a model's modules what runs its single tokens."""
    for cls in dict.fromkeys(map(original_class, modules)):
        found = _fused(cls)  # type: ignore[arg-type]
        if isinstance(found, FusedStep):
            log.info("%s: states of single tokens stay in their pool on %s, by ops", cls.__name__, device)
        elif found:
            log.info("%s: single tokens run by transformers' code: %s", cls.__name__, found)


@functools.cache
def _fused(cls: type[nn.Module]) -> FusedStep | str:
    """What runs one token of a class, or why its own code does; "" where it has no such functions."""
    own = inspect.unwrap(cls.forward)
    if not isinstance(own, FunctionType) or RECURRENCE not in own.__code__.co_names:
        return ""
    if getattr(cls.forward, "__code__", None) not in (own.__code__, _HOOKED):
        return "its forward is wrapped in another way"
    used = {name: own.__globals__.get(name) for name in MADE if name in own.__code__.co_names}
    replaced = {name: of for name, of in used.items() if of is not None and (torchs := _torchs(of)) is not None}
    if not replaced:
        return "kernels are installed"
    for name, of in replaced.items():
        if (torchs := _torchs(of)) is not None and (how := differs(name, torchs)):
            return f"{name} {how}"
    functions = {name: MADE[name].instead(of) for name, of in replaced.items()}
    forward = FunctionType(own.__code__, own.__globals__ | functions, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return FusedStep(force_accelerate_hooks(["conv1d"])(forward), replaced)


def _by_hub(function: Function) -> bool:
    """Whether a kernel of the package ``kernels`` has been set in a function's place."""
    return isinstance(function, nn.Module) and "forward" in vars(function)


def _torchs(function: Function) -> Function | None:
    """The torch code that a function of transformers runs; None where it runs a kernel, or it is not known what."""
    if isinstance(function, nn.Module):  # which ``kernels`` makes of it
        function = inspect.getclosurevars(type(function).forward).nonlocals.get("func", function)
    torchs: Function | None = getattr(function, "__wrapped__", None)
    if torchs is None or not isinstance(function, FunctionType):
        return None
    return torchs if inspect.getclosurevars(function).nonlocals.get("implementation") is torchs else None
