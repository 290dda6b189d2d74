"""What attention costs on one GPU, as far as plans depend on it: sharing, cuts and balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property

from prefixkit.attention.sharing import DECODE_HEADS, TILE_HEADS, CostModel

# Query rows (query heads) of a decode item at most, and of a tile.
DECODE_ROWS = DECODE_HEADS
TILE_ROWS = TILE_HEADS
# Tokens that the roles take at a time.
TILE_UNIT = 64
DECODE_UNIT = 16
DECODE_WARPS = 4
# What one multiprocessor does: a tile of 128 rows at 550 TFLOP/s, and decode items at 4 TB/s (head size 128).
TILE_TOKENS_PER_US = 64.0
DECODE_TOKENS_PER_US = 59.0

# Plans count time in whole numbers of this part of a unit, so that every planner reckons alike, bit by bit.
POINT = 64


@dataclass(frozen=True)
class Role:
    """What the items of one path cost.

    Attributes:
        unit: KV tokens taken at a time; items are cut at multiples of it.
        workers: Items under way on one multiprocessor.
        tokens_per_us: KV tokens of one head that one multiprocessor takes in a microsecond, all its workers together.
        start: Beginning and ending an item, in units of work.
        leave: Writing a partial state, in units.
        fold: Folding one partial state, in units of one worker.
        least: Units below which no item is cut.
    """

    unit: int
    workers: int
    tokens_per_us: float
    start: float
    leave: float
    fold: float
    least: int

    def __post_init__(self) -> None:
        for name in ("unit", "workers", "tokens_per_us", "least"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Role: {name} must be above 0, got {getattr(self, name)!r}")
        for name in ("start", "leave", "fold"):
            if not 0 <= getattr(self, name) < 2**16:
                raise ValueError(f"Role: {name} must be a number of units of at least 0, got {getattr(self, name)!r}")

    def points(self) -> tuple[int, int, int]:
        """``start``, ``leave`` and ``fold`` in whole numbers of 1 / :data:`POINT` unit."""
        return round(self.start * POINT), round(self.leave * POINT), round(self.fold * POINT)


@dataclass(frozen=True)
class GpuCost:
    """One GPU: which nodes are worth sharing, and what the two paths take."""

    sharing: CostModel
    tile: Role
    decode: Role

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """:data:`COST_NUMBERS` numbers, as an op takes them: the fields of ``sharing``, ``tile`` and ``decode``, in order."""
        return (*astuple(self.sharing), *astuple(self.tile), *astuple(self.decode))

    @staticmethod
    def of(numbers: Sequence[float]) -> GpuCost:
        """The cost of which these are the :attr:`numbers`."""
        item, kv_byte, partial_byte, tile_item, decode_item, tile_heads = numbers[:SHARING_NUMBERS]
        sharing = CostModel(item, kv_byte, partial_byte, tile_item, decode_item, int(tile_heads))
        middle = SHARING_NUMBERS + ROLE_NUMBERS
        return GpuCost(sharing, _role(numbers[SHARING_NUMBERS:middle]), _role(numbers[middle:]))


SHARING_NUMBERS, ROLE_NUMBERS = len(fields(CostModel)), len(fields(Role))
COST_NUMBERS = SHARING_NUMBERS + 2 * ROLE_NUMBERS


def _role(numbers: Sequence[float]) -> Role:
    unit, workers, tokens_per_us, start, leave, fold, least = numbers
    return Role(int(unit), int(workers), tokens_per_us, start, leave, fold, int(least))


# One H200, as gpu_calibrate measures it: KV comes at 4.65 TB/s.
H200_COST = CostModel(item=0.0, kv_byte=1 / 4.65e6, partial_byte=2.4e-7, tile_item=0.022, decode_item=0.003)
H200 = GpuCost(
    sharing=H200_COST,
    tile=Role(TILE_UNIT, 1, TILE_TOKENS_PER_US, start=2.0, leave=1.5, fold=1.5, least=1),
    decode=Role(DECODE_UNIT, DECODE_WARPS, DECODE_TOKENS_PER_US, start=1.0, leave=0.5, fold=0.25, least=4),
)
