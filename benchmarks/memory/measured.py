"""The model that memory is measured with, and sessions of a known size."""

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import prefixkit
from benchmarks.runner import Row, free_memory
from benchmarks.shapes import Shape
from prefixkit import Session
from prefixkit.models import kv_spec

PAGE, HEADROOM = 16, 64


class Measured:
    """A model, and helpers for the measurements with it.

    Attributes:
        model: The patched model.
        shape: Its sizes.
        bytes_per_token: Bytes of a token's KV.
    """

    def __init__(self, shape: Shape, options: Any) -> None:
        self.shape, self.options, self.device = shape, options, options.device
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.model = prefixkit.patch(shape.build(self.device, dtype))
        self.bytes_per_token = kv_spec(self.model).bytes_per_token
        self._rng = np.random.default_rng(0)

    def tokens(self, count: int) -> list[int]:
        """Random tokens of a new prompt."""
        return self._rng.integers(0, min(30000, self.shape.vocab), count).tolist()

    @contextmanager
    def session(self, tokens: int, **given: Any) -> Iterator[Session]:
        """A session whose pool holds ``tokens`` tokens."""
        with Session(self.model, kv_budget=tokens * self.bytes_per_token, **given) as session:
            yield session
        free_memory()

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def memory(self) -> Row:
        """MiB now: of the process (its peak, if not on Linux), and of tensors on a GPU."""
        gc.collect()
        try:
            with open("/proc/self/statm") as statm:
                resident = int(statm.read().split()[1]) * resource.getpagesize()
        except OSError:
            resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row: Row = {"host_mib": round(resident / 2**20, 1)}
        return row if self.device == "cpu" else row | {"gpu_mib": round(torch.cuda.memory_allocated() / 2**20, 1)}
