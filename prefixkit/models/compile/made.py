"""What torch.compile has made of patched models: kept from session to session, until a model is unpatched or goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from prefixkit.torch_private import forget_compiled


class Made:
    """Functions of the layers of one model, which any cache may call."""

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self.compiler = compiler  # makes functions of graphs
        self.functions: dict[Hashable, Callable[..., Any]] = {}  # by what tells graphs apart
        self.codes: list[CodeType] = []  # of the functions: torch ties to them what it compiles
        self.ready: set[Hashable] = set()  # keys of the functions that every layer has called
        self.graphs, self.seconds = 0, 0.0  # how many were compiled, and the time that it took
        self.lock = threading.RLock()  # held for the length of a step: what one compiles and packs, another reads
        self.dropped = False  # the model was unpatched


_made: WeakKeyDictionary[nn.Module, dict[Callable[..., Any], Made]] = WeakKeyDictionary()
_lock = threading.Lock()


def made_of(layer: nn.Module, compiler: Callable[..., Any]) -> Made:
    """What ``compiler`` has made of the model whose first decoder layer this is; one for each of both."""
    with _lock:
        return _made.setdefault(layer, {}).setdefault(compiler, Made(compiler))


def drop(modules: Iterable[nn.Module]) -> None:
    """Forget what was made of the models that these modules are of, once no step is in progress."""
    with _lock:
        dropped = [made for module in modules for made in _made.pop(module, {}).values()]
    for made in dropped:
        with made.lock:
            made.dropped = True
            for code in made.codes:
                forget_compiled(code)
            made.functions.clear()
            made.ready.clear()
