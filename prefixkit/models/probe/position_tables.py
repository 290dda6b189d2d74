"""How many positions a model has learned: the rows of the table in which it looks positions up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prefixkit.models.probe.measured import ORDER


class PositionTables(TorchFunctionMode):
    """Notes the learned tables in which a pass over a step's rows looks up their positions, plus a constant.

    The tokens of a probe are in another order than its positions, so that tables of tokens are left out.

    Attributes:
        positions: Positions that the smallest such table has, from 0; None: there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.positions: int | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.embedding and len(args) >= 2:
            self._note(*args[:2])
        return func(*args, **(kwargs or {}))

    def _note(self, indices: Tensor, table: Tensor) -> None:
        plain = type(indices) is Tensor and isinstance(table, nn.Parameter)  # tables of positions are not sharded
        if not plain or not indices.numel() or indices.numel() % len(ORDER):
            return
        rows = indices.reshape(-1, len(ORDER))
        first = rows[0, 0]
        if bool((rows == torch.tensor(ORDER, device=rows.device) + first).all()):
            known = table.shape[0] - int(first)
            self.positions = known if self.positions is None else min(known, self.positions)
