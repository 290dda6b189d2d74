"""What lived before a call is left out of the garbage collections that the call causes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefixkit.engine.request import Request

MANY = 256  # runs of a call that cause full collections, and beside which counting frozen objects costs nothing


@contextmanager
def frozen_heap(requests: Sequence[Request]) -> Iterator[None]:
    """Freeze the objects that exist, and unfreeze them at the end.

    torch and transformers alone are 400,000 objects, which each full collection visits, in a third of a second; a call
    of thousands of samples causes some ten.  Garbage of before is collected after the call.  Where the program has
    frozen objects itself, or a call in another thread has, nothing is changed; nor for requests of few runs.
    """
    if sum(len(request.sample_indices) for request in requests) < MANY or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
