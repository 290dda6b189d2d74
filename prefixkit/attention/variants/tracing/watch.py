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
# What says where a tensor is and of which kind, but not what it holds.
_KINDS = (Tensor.device.__get__, Tensor.dtype.__get__)  # type: ignore[attr-defined]


class ReadsNumbers(Exception):
    """A function reads numbers of a captured tensor while it is traced: these would stay as they are now."""


class Copies(TorchFunctionMode):
    """Knows the tensors that a function computes, in this block, from tensors that existed before.

    Views are none of these: they change with their base.
    """

    def __init__(self) -> None:
        super().__init__()
        # By id: a tensor that was made in the block, which is held, and what made it of older tensors, or None.
        self._made: dict[int, tuple[Tensor, str | None]] = {}

    def operation(self, tensor: Tensor) -> str | None:
        """The operation that computed a tensor from older ones; None for any other tensor."""
        return self._made.get(id(tensor), (tensor, None))[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = "data" if func == Tensor.data.__get__ else str(getattr(func, "__name__", func))  # type: ignore[attr-defined]
        given = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
        older = [each for each in given if self._made.get(id(each), (each, name))[1] is not None]
        if older and name in _READS:
            raise ReadsNumbers(name)
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and not any(made is each for each in given):
                base = next((each for each in given if _shares(made, each)), None) if name != "data" else None
                if base is None:
                    self._made[id(made)] = made, name if older else None
                elif id(base) in self._made:
                    self._made[id(made)] = made, self._made[id(base)][1]
        return result


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
