"""Exclude the objects that existed before a call from the garbage collections that the call causes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefixkit.engine.request import Request

MANY = 256  # calls of this many runs cause full collections; counting frozen objects costs nothing by comparison
# A program that freezes objects freezes thousands.  Python 3.12 starts with 375 frozen objects of its own.
FEW = 1000


@contextmanager
def frozen_heap(requests: Sequence[Request]) -> Iterator[None]:
    """Freeze the objects that exist, and unfreeze them at the end.

    torch and transformers alone make 400,000 objects.  A full collection visits them all, in a third of a second, and a
    call of thousands of samples causes about ten full collections.  Garbage from before the call is collected after it.
    Nothing is frozen if the program, or a call in another thread, has frozen objects, or if the requests have few runs.
    """
    if sum(len(request.sample_indices) for request in requests) < MANY or gc.get_freeze_count() > FEW:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
