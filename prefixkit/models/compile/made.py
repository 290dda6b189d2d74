"""Functions that torch.compile has made for patched models: cached until a model is unpatched or freed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from prefixkit.torch_private import drop_compiled


class Made:
    """Functions of the layers of one model, which any cache may call."""

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self.compiler = compiler  # makes functions of graphs
        self.functions: dict[Hashable, Callable[..., Any]] = {}  # by the graphs' keys
        self.codes: list[CodeType] = []  # of the functions: torch ties compiled code to them
        self.ready: set[Hashable] = set()  # keys of the functions that every layer has called
        self.graphs, self.seconds = 0, 0.0  # number of compiled graphs, and the time that compiling took
        self.lock = threading.RLock()  # held during a step: one step compiles and packs what others read
        self.dropped = False  # the model was unpatched


_made: WeakKeyDictionary[nn.Module, dict[Callable[..., Any], Made]] = WeakKeyDictionary()
_lock = threading.Lock()


def made_of(layer: nn.Module, compiler: Callable[..., Any]) -> Made:
    """The functions of ``compiler`` for the model whose first decoder layer this is; one object for both."""
    with _lock:
        return _made.setdefault(layer, {}).setdefault(compiler, Made(compiler))


def drop(modules: Iterable[nn.Module]) -> None:
    """Drop the functions of the models that contain these modules, once no step is in progress."""
    with _lock:
        dropped = [made for module in modules for made in _made.pop(module, {}).values()]
    for made in dropped:
        with made.lock:
            made.dropped = True
            for code in made.codes:
                drop_compiled(code)
            made.functions.clear()
            made.ready.clear()
