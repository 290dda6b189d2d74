"""Classes made for a patch, and changing a module's class, with the bound ``forward`` that other code stores."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

ORIGINAL = "_prefixkit_original"  # the attribute of a patch's class that holds the class it was made from


def subclass(
    original: type[nn.Module], made_by: Callable[..., type[nn.Module]] | None, methods: dict[str, Any], *arguments: Any
) -> type[nn.Module]:
    """A subclass of a module's class with the same name, with ``methods`` and attributes of its own; see ``unpatch``.

    Pickle and deepcopy find the original class by that name, so they rebuild a module of the class
    ``made_by(original, *arguments)``, or of the original class where ``made_by`` is None.
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _blank, (original, made_by, *arguments), *original.__reduce_ex__(self, protocol)[2:]

    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (original,), {**names, **methods, "__reduce_ex__": reduce, ORIGINAL: original})


def _blank(original: type[nn.Module], made_by: Callable[..., type[nn.Module]] | None, *arguments: Any) -> nn.Module:
    cls = original if made_by is None else made_by(original, *arguments)
    return cls.__new__(cls)


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change a module's class, and rebind the ``forward`` that accelerate's hooks and tensor parallelism store."""
    bound = [name for name in ("forward", "_old_forward") if _is_bound(module, module.__dict__.get(name))]
    held = _held_forward(module.__dict__.get("forward"))
    if held is not None and not _is_bound(module, held.cell_contents):
        held = None
    module.__class__ = cls
    module.__dict__.update(dict.fromkeys(bound, MethodType(cls.forward, module)))
    if held is not None:
        held.cell_contents = MethodType(cls.forward, module)


def is_own_forward(module: nn.Module, forward: object) -> bool:
    """Whether ``forward`` is the bound method of the module's class, or tensor parallelism's wrapper around it."""
    held = _held_forward(forward)
    return _is_bound(module, forward if held is None else held.cell_contents)


def _is_bound(module: nn.Module, forward: object) -> bool:
    return isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward


def _held_forward(forward: object) -> CellType | None:
    """The closure cell in which the ``forward`` set by tensor parallelism stores the ``forward`` that it wraps."""
    if not isinstance(forward, FunctionType) or not str(forward.__module__).startswith("transformers."):
        return None
    found = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    return found.get("original_forward")
