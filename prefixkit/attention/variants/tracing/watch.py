"""Watching what a function does with real tensors while it is called once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Functions that read a tensor's numbers into Python.
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__"}
_READS |= {"equal", "allclose", "is_nonzero"}
# Functions that read the shape and the kind of their first tensor, but not what it holds.
_SHAPES = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
# What says where a tensor is and of which kind, but not what it holds.
_KINDS = (Tensor.device.__get__, Tensor.dtype.__get__)  # type: ignore[attr-defined]


class ReadsNumbers(Exception):
    """A function reads numbers of a captured tensor while it is traced: these would stay as they are now."""


class Copies(TorchFunctionMode):
    """Knows the tensors that a function computes, in this block, from the numbers of tensors that existed before.

    Views are none of these: they change with their base.  A tensor that only has the shape of an older one is none
    either, until the numbers of an older one are written to it.
    """

    def __init__(self) -> None:
        super().__init__()
        # By id: a tensor that was made in the block, which is held, and what made it of older tensors, or None.
        self._made: dict[int, tuple[Tensor, str | None]] = {}

    def operation(self, tensor: Tensor) -> str | None:
        """The operation that computed a tensor from older ones; None for any other tensor."""
        return self._made.get(id(tensor), (tensor, None))[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        name = "data" if func == Tensor.data.__get__ else str(getattr(func, "__name__", func))  # type: ignore[attr-defined]
        given = _tensors((args, options))
        read = given
        if name in _SHAPES:
            read = _tensors((args[1:], [each for key, each in options.items() if key != "input"]))
        older = [each for each in read if self._made.get(id(each), (each, name))[1] is not None]
        if older and name in _READS:
            raise ReadsNumbers(name)
        if older:
            self._write(name, _tensors(_written(name, args, options)))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and not any(made is each for each in given):
                base = next((each for each in given if _shares(made, each)), None) if name != "data" else None
                if base is None:
                    self._made[id(made)] = made, name if older else None
                elif id(base) in self._made:
                    self._made[id(made)] = made, self._made[id(base)][1]
        return result

    def _write(self, name: str, written: list[Tensor]) -> None:
        """Note that an operation has written numbers of older tensors to these, and so to what shares their memory."""
        for key, (made, by) in self._made.items():
            if by is None and any(made is one or _shares(made, one) for one in written):
                self._made[key] = made, name


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _written(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a function of torch may write to: ``out``, or what it changes in place, as its name says."""
    in_place = name in ("__setitem__", "__set__") or name.startswith("__i") or (name[-1:] == "_" and name[-2:] != "__")
    return options.get("out"), args[:1] if in_place else ()


def _shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory; not known, and taken for granted, without a storage."""
    try:
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return True


def uses(function: Callable[..., Any], arguments: Sequence[str], argument: str) -> bool:
    """Whether a function that is not traced computes with one of its arguments, by name.

    The function is called with 0-d tensors; one that fails with zeros and with ones is taken to use all.
    """
    for number in (0, 1):
        given = [torch.tensor(number, dtype=_dtype(name), device="cpu") for name in arguments]
        watch = _Uses(given[list(arguments).index(argument)])
        try:
            with watch, torch.no_grad():
                function(*given)
        except Exception:  # whatever a user's function raises
            if watch.found:
                return True
            continue
        return watch.found
    return True


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "score" else torch.int64


class _Uses(TorchFunctionMode):
    """Notices, in this block, whether a tensor is an operand."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor, self.found = tensor, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        self.found = self.found or (func not in _KINDS and any(each is self._tensor for each in given))
        return func(*args, **(kwargs or {}))
