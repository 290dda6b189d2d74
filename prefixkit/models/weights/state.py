"""What a model computes with: its tensors, how its modules run, and the numbers that modules store."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from prefixkit.attention.variants import Variant
from prefixkit.attention.variants import parts_of as variant_parts
from prefixkit.models.bound_forwards import ORIGINAL
from prefixkit.models.weights.borrowed import WITH_MEMORY, parts_of

# Types of plain attributes that a module may compute with.
_NUMBERS = frozenset({bool, int, float, complex, np.float32, np.float64, np.int32, np.int64})
_CONTAINERS = frozenset({list, tuple, dict})
# The attributes of every module, and those of them that are read.
_COMMON = frozenset(nn.Module().__dict__)
# What a call of a model stores for its next call: a new tensor each time, which steps with given positions do not read.
_OF_CALLS = frozenset({"rope_deltas"})
# The module of transformers whose hooks record outputs; they stay once a caller has asked for some.
_RECORDS = "transformers.utils.output_capturing"
_READ = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
# By class and number of attributes (modules of one class mostly have the same attributes): the function that reads a
# module's attributes, the name of the class, and whether the class is an adapter's.
_readers: dict[tuple[type[nn.Module], int], tuple[Callable[[dict[str, Any]], Any], str, bool]] = {}


@dataclass(frozen=True, slots=True)
class ModelState:
    """What a model computes with, in a fixed order.

    Attributes:
        tensors: Parameters and buffers, and the tensors that variants of attention capture.
        modes: How each module runs: its class, mode, hooks and adapters, its numbers and those of its config, the code
            of its variant of attention; autocast, and the precision of products in float32.
        forwards: Functions that replace modules' own ``forward``.
        of_classes: The ``forward`` of each class of modules, without the patch.
        plain: Tensors that modules store as plain attributes, without those of a call for the next.
        modules: The modules; a module that is in two places is listed twice.
        hooked: Whether some module has hooks of its forward pass, apart from those of transformers that record outputs
            where a caller has asked for them.
    """

    tensors: list[Tensor]
    modes: list[Hashable]
    forwards: list[Callable[..., Any]]
    of_classes: list[Callable[..., Any]]
    plain: list[Tensor]
    modules: list[nn.Module]
    hooked: bool


class WeightsPlaces(NamedTuple):
    """What :func:`weights_places` returns.

    Attributes:
        values: What graphs of the model depend on.
        hooked: Whether some module has hooks: their Python code runs when a graph is captured, not when it is replayed.
    """

    values: tuple[Hashable, ...]
    hooked: bool


def weights_places(model: nn.Module, state: ModelState | None = None) -> WeightsPlaces:
    """Addresses of the model's tensors, how modules use them, and weak references to the functions that do.

    CUDA graphs of the model are stale if it changes.

    Unlike the version, it changes when weights are packed, and stays when weights are written in place.

    Args:
        model: The model.
        state: What it computes with, if that has just been read; None: it is read here.
    """
    state = state_of(model) if state is None else state
    functions = map(weakref.ref, (*state.forwards, *state.of_classes))
    tensors = [*state.tensors, *state.plain]
    if not WITH_MEMORY.issuperset(map(type, tensors)):
        tensors = [part for tensor in tensors for part in parts_of(tensor)]
    return WeightsPlaces((*state.modes, *functions, *map(_address, tensors)), state.hooked)


def adapter_states(model: nn.Module) -> dict[str, Hashable]:
    """Which adapters are active, disabled and merged, and their scales, by the names of modules with adapters."""
    named = model.named_modules()
    found = [(name, module) for name, module in named if _is_adapter(type(module))]  # type: ignore[arg-type]
    return {name: (*_adapter_state(module),) for name, module in found}


def state_of(model: nn.Module) -> ModelState:
    """What a model computes with, read anew at each call."""
    found: list[Tensor | None] = []
    modes: list[Hashable] = []
    forwards: list[Callable[..., Any]] = []
    plain: list[Tensor] = []
    modules: list[nn.Module] = []
    configs: dict[int, Any] = {}
    variants: dict[int, Variant] = {}
    left: list[nn.Module | None] = [model]
    hooked = False
    while left:  # five times as fast as model.parameters(), and nothing is cached
        if (module := left.pop()) is not None:
            getter, name, adapts = _readers.get((type(module), len(module.__dict__))) or _reader(module)
            try:
                parameters, buffers, children, hooks, pre_hooks, *values = getter(module.__dict__)
            except KeyError:  # other attributes than the last module of its class had
                getter, name, adapts = _reader(module)
                parameters, buffers, children, hooks, pre_hooks, *values = getter(module.__dict__)
            modules.append(module)
            modes.append(name)
            if parameters:
                found += parameters.values()
            if buffers:
                found += buffers.values()
            if children:
                left += children.values()
            if hooks or pre_hooks:
                hooked = hooked or any(map(_acts, (*hooks.values(), *pre_hooks.values())))
                modes.append((*hooks, None, *pre_hooks))  # numbers, never reused
            if _NUMBERS.issuperset(map(type, values)):  # including whether the module is in training mode
                modes += values
                values = []
            else:
                modes += [value for value in values if type(value) in _NUMBERS]
            for value in values:
                if (kind := type(value)) is Tensor:
                    plain.append(value)
                elif kind in _CONTAINERS:
                    modes += _numbers_in(value)
                elif kind is Variant:
                    variants.setdefault(id(value), value)
                    modes.append([*variants].index(id(value)))
                elif isinstance(value, PretrainedConfig):
                    configs[id(value)] = value
            if (forward := module.__dict__.get("forward")) is not None:
                forwards.append(getattr(forward, "__func__", forward))
            if adapts:
                modes += _adapter_state(module)
    for config in configs.values():
        modes += plain_numbers(config)
    for variant in variants.values():
        parts = variant_parts(variant)
        found += [part for part in parts if isinstance(part, Tensor)]
        modes += [part for part in parts if not isinstance(part, Tensor) and isinstance(part, Hashable)]
    modes += [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    backends: tuple[Any, ...] = torch.backends.cuda, torch.backends.mkldnn
    modes += [backend.matmul.fp32_precision for backend in backends]
    classes = dict.fromkeys(map(type, modules))
    of_classes = [getattr(cls.__dict__.get(ORIGINAL, cls), "forward", None) for cls in classes]
    own: list[Callable[..., Any]]
    own = [forward for forward in of_classes if isinstance(forward, FunctionType)]  # a scripted module's class has none
    tensors = [tensor for tensor in found if tensor is not None]
    return ModelState(tensors, modes, forwards, own, plain, modules, hooked)


def _acts(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) != _RECORDS


def plain_numbers(owner: Any) -> list[Hashable]:
    """The numbers that a module or a config stores as plain attributes, also those in lists, tuples and dicts."""
    found: list[Hashable] = []
    for value in vars(owner).values():
        if (kind := type(value)) in _NUMBERS:
            found.append(value)
        elif kind in _CONTAINERS:
            found += _numbers_in(value)
    return found


def _numbers_in(values: Any) -> list[Hashable]:
    """The numbers of a list or tuple, or among the values of a dict, and their places."""
    pairs = values.items() if type(values) is dict else enumerate(values)
    return [pair for pair in pairs if type(pair[1]) in _NUMBERS]


def _reader(module: nn.Module) -> tuple[Callable[[dict[str, Any]], Any], str, bool]:
    """The function that reads a module's attributes (those of ``_READ``, its mode, and attributes that not every module
    has); the name of its class; and whether the class is an adapter's.
    """
    kind, parts = type(module), module.__dict__
    # A module made by torch.compile stores no mode of its own.
    own = [name for name in parts if name == "training" or name not in _COMMON | _OF_CALLS]
    getter = itemgetter(*_READ, *own)
    found = _readers[kind, len(parts)] = getter, kind.__qualname__, _is_adapter(kind)  # type: ignore[arg-type]  # classes hash
    return found


def adapters_by_row(state: ModelState) -> bool:
    """Whether PEFT has been told which adapter each row of a batch uses, which it passes to its layers by hooks."""
    return any(module._forward_pre_hooks for module in state.modules if _is_adapter(type(module)))  # type: ignore[arg-type]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # some weights have no memory with an address
        return id(tensor)


@functools.cache
def _is_adapter(kind: type[nn.Module]) -> bool:
    """Whether modules of a class choose between adapters: tuner layers of PEFT, and its wrappers of whole modules.

    The module that defines a class identifies it, so PEFT need not be installed.
    """
    return any(cls.__module__.startswith("peft.") and hasattr(cls, "set_adapter") for cls in kind.__mro__)


def _adapter_state(module: nn.Module) -> list[Hashable]:
    state = [
        _frozen(getattr(module, name, None)) for name in ("_active_adapter", "_disable_adapters", "merged_adapters")
    ]
    for name, value in module.__dict__.items():
        if "scal" in name:  # `scaling` of LoRA; other tuners name it differently
            state += (name, _frozen(value))
    return state


def _frozen(value: Any) -> Hashable:
    kind = type(value)
    if kind is bool or kind is str or kind is float or kind is int or value is None:
        return value  # type: ignore[no-any-return]
    if isinstance(value, dict):
        return tuple([(key, _frozen(entry)) for key, entry in value.items()])
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(entry) for entry in value])
    return repr(value)
