"""The replacement class of modules that keep a state in place of KV, made from the original one.

When one of our caches arrives, the packed tokens of a step go through the original ``forward`` in batches of sequences
of equal length, each sequence from the state before it; see ``attention/state_batches.py``.  With any other cache the
original ``forward`` runs as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.kv.state_pool import StateTensor
from prefixkit.models.attention_class import original_class
from prefixkit.models.bound_forwards import subclass
from prefixkit.models.states.fused_functions import PoolState
from prefixkit.models.states.scan_bodies import states_body
from prefixkit.models.states.segment_cache import SegmentCache

_UPDATES = {"update_conv_state", "update_recurrent_state"}
_INDEX = "layer_idx"


def mixers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that keep a state in place of KV, patched or not, by name; submodules of such a module
    are left out, although they may keep states in the same cache.
    """
    found = dict[str, nn.Module]()
    inside = set[nn.Module]()
    for name, module in model.named_modules():  # a module comes before its submodules
        if is_mixer(module) and module not in inside:
            found[name] = module
            inside.update(module.modules())
    return found


def is_mixer(module: nn.Module) -> bool:
    """Whether a module keeps a state in a cache of transformers."""
    cls = original_class(module)
    if states_body(cls) is not None:  # type: ignore[arg-type]  # classes hash
        return True
    return keeps_state(cls) and isinstance(getattr(module, _INDEX, None), int)  # type: ignore[arg-type]


@functools.cache
def keeps_state(cls: type[nn.Module]) -> bool:
    """Whether the code of a class's methods writes states to a cache, and does not attend."""
    names = set[str]()
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            names.update(() if code is None else code.co_names)
    return bool(_UPDATES & names) and "get_interface" not in names


@functools.cache
def mixer_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a class that also accepts our caches; one subclass per original class."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = _among(args, kwargs)
        if cache is None:
            return original.forward(self, *args, **kwargs)
        return (not_traced if torch.compiler.is_compiling() else on_tree)(self, cache, args, kwargs)

    def on_tree(self: nn.Module, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cache.run_state(self, args, kwargs)

    not_traced = torch.compiler.disable(on_tree)  # type: ignore[no-untyped-call]
    return subclass(original, mixer_class, {"forward": forward})


def _among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache that a module was called with, or an attention module's part of it, if it is one of ours."""
    return next((value for value in (*args, *kwargs.values()) if hasattr(value, "run_state")), None)


Select = Callable[[Tensor], Tensor]


def run_texts(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tokens: int,
    select: Select,
    states: Sequence[StateTensor] = (),
    values: Sequence[Tensor | PoolState] | None = None,
    plain: bool = False,
    forward: Callable[..., Any] | None = None,
) -> tuple[Any, SegmentCache]:
    """The output of the original ``forward`` for some sequences of a step, and the cache with the states after them.

    Args:
        module, args, kwargs: The module, and the arguments that it was called with for ``[1, tokens]``.
        tokens: Tokens of the step.
        select: Selects the sequences' rows: ``[1, tokens, ...]`` to ``[sequences, length, ...]``.
        states, values: See :class:`SegmentCache`.
        plain: Run the original code without a cache.
        forward: Replaces the original ``forward``.
    """
    original = original_class(module)
    cache = SegmentCache(getattr(module, _INDEX, 0), states, values)
    with_cache = None if plain else cache

    def given(value: Any) -> Any:
        if hasattr(value, "run_state"):
            return with_cache
        if isinstance(value, Tensor):
            if not value.numel():
                return None  # the mask of a step, which has no padding
            return select(value) if value.ndim >= 2 and value.shape[:2] == (1, tokens) else value
        if isinstance(value, tuple):
            return tuple(map(given, value))
        return value

    if plain:
        called, kwargs = original.forward, kwargs | dict.fromkeys({"use_cache"} & kwargs.keys(), False)
    else:
        called = forward or states_body(original) or original.forward  # type: ignore[arg-type]
    made = called(module, *map(given, args), **{name: given(value) for name, value in kwargs.items()})
    return made, cache
