"""Where the weights lie that graphs read."""

from __future__ import annotations

from collections.abc import Callable, Hashable


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

    @property
    def stale(self) -> bool:
        """Whether they have moved since :meth:`look`."""
        return self._moves() != self._count and self._places() != self._known  # else another model's have moved

    def look(self) -> bool:
        """Whether they lie elsewhere than when this was asked last."""
        places = self._places()
        moved, self._known = places != self._known, places
        self.skip_moves()
        return moved

    def skip_moves(self) -> None:
        """What may have moved them so far has not."""
        self._count = self._moves()
