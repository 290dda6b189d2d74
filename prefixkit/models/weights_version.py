"""The version of a model's weights: equal as long as the model computes the same function, as far as torch can tell."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from prefixkit.models.weights_memory import memory_of, optimizer_steps, parts_of

# Of a tuner layer of PEFT that was seen merged: what was merged into it when last seen, and how often that changed.
_merges: WeakKeyDictionary[nn.Module, tuple[Hashable, int]] = WeakKeyDictionary()


# Types of plain attributes that a module may compute with.
_NUMBERS = frozenset({bool, int, float, complex, np.float32, np.float64, np.int32, np.int64})
_CONTAINERS = frozenset({list, tuple, dict})
# What every module has, and what of it is read.
_COMMON = frozenset(nn.Module().__dict__)
_READ = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training")
# What reads a module's attributes, its class's name and whether that is an adapter's, by class and number of
# attributes: modules of one class mostly have the same.
_readers: dict[tuple[type[nn.Module], int], tuple[Callable[[dict[str, Any]], Any], str, bool]] = {}


@dataclass(frozen=True, slots=True)
class ModelState:
    """What a model computes with, in a fixed order.

    Attributes:
        tensors: Parameters and buffers.
        modes: How each module runs: its class, mode, hooks and adapters, and its numbers and those of its config.
        forwards: Functions that run in the place of modules' own ``forward``.
        plain: Tensors that modules keep as plain attributes.
    """

    tensors: list[Tensor]
    modes: list[Hashable]
    forwards: list[Callable[..., Any]]
    plain: list[Tensor]


@dataclass(frozen=True, eq=False)
class WeightsVersion:
    """What :func:`weights_version` returns: it is compared, hashed and kept, not read."""

    facts: tuple[Hashable, ...]
    objects: tuple[weakref.ref[Any], ...]

    def __eq__(self, other: object) -> bool:
        if (
            not isinstance(other, WeightsVersion)
            or self.facts != other.facts
            or len(self.objects) != len(other.objects)
        ):
            return False
        # Ids would not do: what is in the place of something that is gone may have its id.
        pairs = zip(self.objects, other.objects, strict=True)
        return all(one is two or ((known := one()) is not None and known is two()) for one, two in pairs)

    def __hash__(self) -> int:
        return hash(self.facts)


def weights_version(model: nn.Module) -> Hashable:
    """A value that differs from an earlier one whenever what the model computes may have changed in between.

    From the first question on it sees tensors that were written to in place, replaced, moved, or given another shape or
    dtype; steps of any optimizer, fused ones included; adapters of PEFT that were added, removed, switched on or off,
    merged or scaled; modules put into training or evaluation mode, or replaced by others; hooks, a ``forward`` that a
    module was given, and autocast.  Weights that prefixkit packs have the version that they had before.  Adapters of
    before have the version of before again, except after merging, which does not leave the weights bit by bit as they
    were.

    Numbers that modules and their configs keep as plain attributes are part of it.  It cannot see what torch does not
    count: writes through ``tensor.data`` or a raw pointer, and in-place writes to inference tensors (those made under
    ``torch.inference_mode``); :func:`prefixkit.models.weights_content.kv_version` does.  Neither sees changes that are
    undone before the next question.  A model whose weights are loaded anew for each step, as accelerate's offloading
    does, has a new version after each.

    Args:
        model: Any module, patched or not.  It is not kept alive.

    Returns:
        A hashable value that equals only values of the same model.  About 1 us for each parameter, buffer and module;
        nothing is read from the device.
    """
    return version_of(state_of(model))


def version_of(state: ModelState) -> WeightsVersion:
    """The version of a model in this state."""
    optimizer_steps()  # are counted from now on
    facts = [*state.modes, *_autocast()]
    for tensor in state.tensors:
        facts += _facts(tensor)
    return WeightsVersion(tuple(facts), (*map(weakref.ref, state.tensors), *map(weakref.ref, state.forwards)))


def weights_places(model: nn.Module) -> Hashable:
    """Where parameters and buffers lie, and how modules use them: a CUDA graph of the model is invalid once it differs.

    Unlike the version, it differs where weights were packed, and not where they were written to in place.
    """
    state = state_of(model)
    try:
        return *state.modes, *[tensor.data_ptr() for tensor in state.tensors]
    except RuntimeError:
        return *state.modes, *[_address(tensor) for tensor in state.tensors]


def counters_of(state: ModelState) -> list[Hashable] | None:
    """What is fast to read of a model in this state: while it, tensors and forwards are the same, so is the version.

    None where tensors consist of others, or were made in inference mode.
    """
    try:
        writes = [tensor._version for tensor in state.tensors]
        places = [tensor.data_ptr() for tensor in state.tensors]
    except RuntimeError:
        return None
    return [optimizer_steps(), *_autocast(), *state.modes, *writes, *places]


def adapter_states(model: nn.Module) -> dict[str, Hashable]:
    """Which adapters are active, disabled and merged, and their scales, by the names of the modules that have some."""
    named = model.named_modules()
    found = [(name, module) for name, module in named if _is_adapter(type(module))]  # type: ignore[arg-type]
    return {name: (*_adapter_state(module),) for name, module in found}


def state_of(model: nn.Module) -> ModelState:
    """What a model computes with; nothing of it is kept from an earlier question."""
    found: list[Tensor | None] = []
    modes: list[Hashable] = []
    forwards: list[Callable[..., Any]] = []
    plain: list[Tensor] = []
    configs: dict[int, Any] = {}
    left: list[nn.Module | None] = [model]
    while left:  # five times as fast as model.parameters(), and nothing is cached
        if (module := left.pop()) is not None:
            (parameters, buffers, children, hooks, pre_hooks, *values), name, adapts = _read(module)
            modes.append(name)
            if parameters:
                found += parameters.values()
            if buffers:
                found += buffers.values()
            if children:
                left += children.values()
            if hooks or pre_hooks:
                modes.append((*hooks, None, *pre_hooks))  # numbers, never reused
            for value in values:
                if (kind := type(value)) in _NUMBERS:  # whether it is in training mode, too
                    modes.append(value)
                elif kind is Tensor:
                    plain.append(value)
                elif kind in _CONTAINERS:
                    modes += _numbers_in(value)
                elif isinstance(value, PretrainedConfig):
                    configs[id(value)] = value
            if (forward := module.__dict__.get("forward")) is not None:
                forwards.append(getattr(forward, "__func__", forward))
            if adapts:
                modes += _adapter_state(module)
                modes.append(_times_merged(module))
    for config in configs.values():
        modes += plain_numbers(config)
    return ModelState([tensor for tensor in found if tensor is not None], modes, forwards, plain)


def plain_numbers(owner: Any) -> list[Hashable]:
    """The numbers that a module or a config keeps as plain attributes, in lists, tuples and dicts too."""
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


def _read(module: nn.Module) -> tuple[tuple[Any, ...], str, bool]:
    """The values of the attributes ``_READ`` and of those that not every module has, its class's name, and whether it
    is an adapter.
    """
    kind, parts = type(module), module.__dict__
    try:
        getter, name, adapts = _readers[kind, len(parts)]
        return getter(parts), name, adapts
    except KeyError:
        getter = itemgetter(*_READ, *[name for name in parts if name not in _COMMON])
        _readers[kind, len(parts)] = getter, kind.__qualname__, _is_adapter(kind)  # type: ignore[arg-type]  # classes hash
        return getter(parts), *_readers[kind, len(parts)][1:]


def _autocast() -> list[Hashable]:
    """What autocast computes in, on any device; nothing where it is off."""
    return [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def adapters_by_row(model: nn.Module) -> bool:
    """Whether PEFT has been told which adapter each row of a batch takes, which it says to its layers by hooks."""
    return any(module._forward_pre_hooks for module in model.modules() if _is_adapter(type(module)))  # type: ignore[arg-type]


def _facts(tensor: Tensor) -> Sequence[Hashable]:
    """What tells a tensor's values from others; its device is that of its memory."""
    try:
        storage = tensor.untyped_storage()
        memory = memory_of(storage)
        begin = memory.shift + tensor.storage_offset() * tensor.itemsize
        return memory.number, memory.writes, begin, _writes(tensor), tensor.dtype, *tensor.shape, *tensor.stride()
    except (RuntimeError, NotImplementedError):  # it consists of other tensors, or is of another layout
        parts = [part for part in parts_of(tensor) if part is not tensor]
        inner = [fact for part in parts for fact in _facts(part)]
        return id(tensor), _writes(tensor), tensor.dtype, *tensor.shape, *inner


def _writes(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, where torch counts no writes
        return -1


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # some quantised weights consist of other tensors
        return id(tensor)


@functools.cache
def _is_adapter(kind: type[nn.Module]) -> bool:
    """Whether modules of a class choose between adapters: tuner layers of PEFT, and its wrappers of whole modules.

    They are known by their place: PEFT need not be installed.
    """
    return any(cls.__module__.startswith("peft.") and hasattr(cls, "set_adapter") for cls in kind.__mro__)


def _adapter_state(module: nn.Module) -> list[Hashable]:
    state = [
        _frozen(getattr(module, name, None)) for name in ("_active_adapter", "_disable_adapters", "merged_adapters")
    ]
    for name, value in module.__dict__.items():
        if "scal" in name:  # `scaling` of LoRA; other tuners have names of their own for it
            state += (name, _frozen(value))
    return state


def _times_merged(module: nn.Module) -> int:
    """How often this module was seen with other adapters merged than before: merging writes through ``.data``."""
    merged = getattr(module, "merged_adapters", None)
    if not merged and (not _merges or module not in _merges):
        return 0
    before, times = _merges.get(module, ((), 0))
    if (now := _frozen(merged or ())) != before:
        times += 1
        _merges[module] = now, times
    return times


def _frozen(value: Any) -> Hashable:
    kind = type(value)
    if kind is bool or kind is str or kind is float or kind is int or value is None:
        return value  # type: ignore[no-any-return]
    if isinstance(value, dict):
        return tuple([(key, _frozen(entry)) for key, entry in value.items()])
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(entry) for entry in value])
    return (*_facts(value),) if isinstance(value, Tensor) else repr(value)
