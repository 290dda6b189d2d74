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
        biased: Whether layers add a bias to their scores, for which they or the model ask.
    """

    takes_offsets = biased = False
    _step: Step | None = None  # in progress

    @property
    def longest(self) -> int:
        """Tokens of the longest text of the step, up to its last row in the step."""
        plans = () if self._step is None else self._step.plans
        return max((int(plan.tree.positions.max(initial=-1)) + 1 for plan in plans), default=0)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """0; see :func:`row_offsets` for a model that counts positions from it."""
        return row_offsets(self._step.positions) if self.takes_offsets and self._step is not None else 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Positions of the longest text, and the first, from which a model makes distances for biases of its layers."""
        return (self.longest if self.biased and self._step is not None else query_length), 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """0; see :func:`row_offsets` for a model that makes biases."""
        return row_offsets(self._step.positions) if self.biased and self._step is not None else 0

    def text_positions(self) -> Tensor:
        """See :class:`LayeredCache`."""
        assert self._step is not None, "models ask in a step"
        return text_positions(self.longest, self._step.tokens.device)
