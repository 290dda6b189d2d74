"""What a cache answers a model that asks how long the texts of a step are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.models.indexing.plain_layer import row_offsets
from prefixkit.models.indexing.text_positions import text_positions
from prefixkit.models.layered_cache import LayeredCache


class AskedLengths(LayeredCache):
    """A cache whose rows are at positions of many texts; between steps it answers as an empty cache.

    Attributes:
        takes_offsets: See ``Probed``.
    """

    takes_offsets = False
    _step: Step | None = None  # in progress

    @property
    def longest(self) -> int:
        """Tokens of the longest text of the step, up to its last row in the step."""
        plans = () if self._step is None else self._step.plans
        return max((int(plan.tree.positions.max(initial=-1)) + 1 for plan in plans), default=0)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """0; see :func:`row_offsets` for a model that counts positions from it."""
        return self.get_query_offset() if self.takes_offsets else 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Positions of the longest text, and the first, from which a model makes distances for biases of its layers."""
        return (query_length if self._step is None else self.longest), 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """See :func:`row_offsets`."""
        return 0 if self._step is None else row_offsets(self._step.positions)

    def text_positions(self) -> Tensor:
        """See :class:`LayeredCache`."""
        assert self._step is not None, "models ask in a step"
        return text_positions(self.longest, self._step.tokens.device)
