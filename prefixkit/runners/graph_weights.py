"""Where the weights lie that graphs read."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from prefixkit.agreement import Agreement, everywhere


class GraphWeights:
    """Notices that a model's weights lie elsewhere than when graphs were captured.

    Args:
        places: Says where what the model reads lies.
        moves: Counts what may have moved it: of this model or of another.
    """

    def __init__(self, places: Callable[[], Hashable], moves: Callable[[], int]) -> None:
        self._places, self._moves = places, moves
        self._known: Hashable = None
        self._count = 0

    def stale(self, agreement: Agreement) -> bool:
        """Whether they have moved since :meth:`look`, in some process."""
        if self._moves() == self._count:
            return False
        return not everywhere(agreement, self._places() == self._known)  # else another model's have moved

    def look(self, agreement: Agreement) -> bool:
        """Whether they lie elsewhere, in some process, than when this was asked last."""
        places = self._places()
        moved, self._known = places != self._known, places
        self.skip_moves()
        return not everywhere(agreement, not moved)

    def skip_moves(self) -> None:
        """What may have moved them so far has not."""
        self._count = self._moves()
