"""The addresses of the weights that graphs read."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from prefixkit.agreement import Agreement, everywhere


class GraphWeights:
    """Detects that a model's weights have moved since graphs were captured.

    Args:
        places: Returns the addresses of the tensors that the model reads, from its state if it is given one.
        moves: Counts events that may have moved these tensors or those of another model.

    Attributes:
        hooked: Whether the model had hooks at the last look, by the attribute ``hooked`` of what ``places`` returns.
    """

    hooked = False

    def __init__(self, places: Callable[..., Hashable], moves: Callable[[], int]) -> None:
        self._places, self._moves = places, moves
        self._known: Hashable = None
        self._count = 0

    def stale(self, agreement: Agreement) -> bool:
        """Whether the weights have moved since :meth:`look`, in some process."""
        if self._moves() == self._count:
            return False
        return not everywhere(agreement, self._places() == self._known)  # if equal, another model's weights have moved

    def look(self, agreement: Agreement, state: object = None) -> bool:
        """Whether the weights have moved, in some process, since the last call of this method.

        ``state``: the model's state, if it has just been read, which takes a millisecond.
        """
        places = self._places() if state is None else self._places(state)
        moved, self._known = places != self._known, places
        self.hooked = getattr(places, "hooked", False)
        self.skip_moves()
        return not everywhere(agreement, not moved)

    def skip_moves(self) -> None:
        """Declare that no event counted so far has moved the weights."""
        self._count = self._moves()
