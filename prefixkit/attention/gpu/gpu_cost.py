"""The costs of attention on one GPU that plans depend on: for sharing, splits and balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property

from prefixkit.attention.sharing import DECODE_ROWS, CostModel

# Plans count time in whole numbers of 1 / POINT KV tile, so that all planners agree bit by bit.
POINT = 64


@dataclass(frozen=True)
class Role:
    """What the items of the tile path or of the decode path cost.

    Attributes:
        kv_tile: Tokens of a KV tile; items are split at multiples of it.
        workers: Items that run at once on one multiprocessor.
        tokens_per_us: KV tokens of one head that all workers of one multiprocessor process in a microsecond.
        start: The time to begin and end an item, in KV tiles.
        write: The time to write a partial state, in KV tiles.
        merge: The time to merge one partial state, in KV tiles of one worker.
        least: An item of fewer KV tiles than this is not split.
    """

    kv_tile: int
    workers: int
    tokens_per_us: float
    start: float
    write: float
    merge: float
    least: int

    def __post_init__(self) -> None:
        for name in ("kv_tile", "workers", "tokens_per_us", "least"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Role: {name} must be above 0, got {getattr(self, name)!r}")
        for name in ("start", "write", "merge"):
            if not 0 <= getattr(self, name) < 2**16:
                raise ValueError(
                    f"Role: {name} must be a number of KV tiles of at least 0, got {getattr(self, name)!r}"
                )

    def points(self) -> tuple[int, int, int]:
        """``start``, ``write`` and ``merge`` in whole numbers of 1 / :data:`POINT` KV tile."""
        return round(self.start * POINT), round(self.write * POINT), round(self.merge * POINT)


@dataclass(frozen=True)
class GpuCost:
    """The costs of one GPU.

    Attributes:
        sharing: The cost model that decides which nodes are worth sharing.
        tile, decode: The costs of the tile path and of the decode path.
        low_tile_heads: Query heads of a low tile, which half of the warps process in about half the time; 0: the kernel
            has no low tiles.
    """

    sharing: CostModel
    tile: Role
    decode: Role
    low_tile_heads: int = 0

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """:data:`COST_NUMBERS` numbers, as an op takes them: the fields of ``sharing``, ``tile`` and ``decode``, and
        ``low_tile_heads``.
        """
        return (*astuple(self.sharing), *astuple(self.tile), *astuple(self.decode), self.low_tile_heads)

    @staticmethod
    def of(numbers: Sequence[float]) -> GpuCost:
        """The cost with these :attr:`numbers`."""
        item, kv_byte, partial_byte, tile_item, decode_item, tile_path, *heads = numbers[:SHARING_NUMBERS]
        sharing = CostModel(item, kv_byte, partial_byte, tile_item, decode_item, tile_path, *map(int, heads))
        middle = SHARING_NUMBERS + ROLE_NUMBERS
        roles = _role(numbers[SHARING_NUMBERS:middle]), _role(numbers[middle:-1])
        return GpuCost(sharing, *roles, int(numbers[-1]))


SHARING_NUMBERS, ROLE_NUMBERS = len(fields(CostModel)), len(fields(Role))
COST_NUMBERS = SHARING_NUMBERS + 2 * ROLE_NUMBERS + 1


def _role(numbers: Sequence[float]) -> Role:
    kv_tile, workers, tokens_per_us, start, write, merge, least = numbers
    return Role(int(kv_tile), int(workers), tokens_per_us, start, write, merge, int(least))


# One H200, as `calibrate` measures it: KV is read at 4.65 TB/s; its multiprocessors together compute tiles of 128 rows
# at 550 TFLOP/s, and decode items, one for each of four warps, at 4 TB/s (head size 128).
H200_COST = CostModel(
    item=0.0,
    kv_byte=1 / 4.65e6,
    partial_byte=2.4e-7,
    tile_item=0.022,
    decode_item=0.003,
    tile_path=1.0,
    read_by_tiles=1,
)
H200 = GpuCost(
    sharing=H200_COST,
    tile=Role(kv_tile=64, workers=1, tokens_per_us=64.0, start=2.0, write=1.5, merge=1.5, least=1),
    decode=Role(kv_tile=16, workers=4, tokens_per_us=59.0, start=1.0, write=0.5, merge=0.25, least=4),
)


def with_tiles(cost: GpuCost, tile_rows: int, decode_rows: int, decode_kv_tile: int, low_tile_rows: int = 0) -> GpuCost:
    """The cost for a kernel whose items hold these numbers of rows, and whose decode items have KV tiles of this size.

    The workers that hold a decode item's rows process it together, as many times faster than one worker alone.
    """
    together, decode = -(-decode_rows // DECODE_ROWS), cost.decode
    slower = {name: getattr(decode, name) * together for name in ("start", "write", "merge")}
    decode = replace(decode, kv_tile=decode_kv_tile, workers=decode.workers // together, **slower)
    sharing = replace(cost.sharing, tile_heads=tile_rows, decode_heads=decode_rows)
    return replace(cost, sharing=sharing, decode=decode, low_tile_heads=low_tile_rows)


def tiles_only(cost: GpuCost) -> GpuCost:
    """The cost of a kernel in which decode items take the tile path too."""
    return replace(cost, sharing=replace(cost.sharing, tile_path=0.0), decode=cost.tile)


# Latents of 512 + 64 on one H200: a multiprocessor processes 64 tokens for 64 query heads in 1.5 us; an item's queries
# are 72 KB, a partial state 128 KB.
_LATENT_TILE = Role(kv_tile=64, workers=1, tokens_per_us=42.0, start=2.0, write=1.5, merge=1.5, least=1)
H200_LATENT = GpuCost(replace(H200_COST, tile_path=0.0, tile_heads=64, read_by_tiles=0), _LATENT_TILE, _LATENT_TILE)
