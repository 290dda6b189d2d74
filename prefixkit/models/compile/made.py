"""What torch.compile has made of patched models: kept from session to session, until a model is unpatched or goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn


class Made:
    """Functions of the layers of one model, which any cache may call.

    Attributes:
        compiler: Made their graphs into functions.
        functions: By what tells graphs apart.
        codes: Of the functions, to which torch ties what it compiles.
        ready: Of these, what every layer has called.
        graphs, seconds: How many graphs were compiled, and the time that it took.
        lock: Held by a thread for the length of a step: what a step compiles and packs, another reads.
        dropped: Whether the model was unpatched.
    """

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self.compiler = compiler
        self.functions: dict[Hashable, Callable[..., Any]] = {}
        self.codes: list[CodeType] = []
        self.ready: set[Hashable] = set()
        self.graphs, self.seconds = 0, 0.0
        self.lock = threading.RLock()
        self.dropped = False


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
                torch._C._dynamo.eval_frame.reset_code(code)
            made.functions.clear()
            made.ready.clear()
