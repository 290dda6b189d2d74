"""How often an op is called, whoever calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts calls of an op while it is entered."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.times = op, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.times += func is self.op
        return func(*args, **(kwargs or {}))
