"""How the blocks of the sampling kernel share a row of logits."""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 8  # of a block
_STEP = 128  # tokens that a warp takes at a time
_BLOCKS = (1, 2, 4, 8)
# struct Shared of csrc/sampling/sample_block.cuh; the row's cache follows.
HEAD_BYTES = 64 * (8 + 8 + 4 + 3 * 4 + 4) + 32 + 2048 * 4
_BLOCKS_PER_SM = 3


@dataclass(frozen=True)
class Tiling:
    """How a row is divided.

    Attributes:
        blocks: Of a row's cluster.
        segment: Tokens of each warp.
        cached: Whether the blocks keep the row in shared memory, so that logits are read once.
    """

    blocks: int
    segment: int
    cached: bool

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return HEAD_BYTES + (4 * WARPS * self.segment if self.cached else 0)


def tile(vocab: int, max_shared: int, clusters: bool) -> Tiling:
    """The fewest blocks of which three fit on a multiprocessor, so that some read while others compute; else all there are.

    Args:
        vocab: Tokens of a row.
        max_shared: Most shared memory of a block, in bytes.
        clusters: Whether blocks can work together (compute capability 9.0 and later).
    """
    found = Tiling(1, 0, False)
    for blocks in _BLOCKS if clusters else _BLOCKS[:1]:
        steps = -(-vocab // (blocks * WARPS * _STEP))
        found = Tiling(blocks, steps * _STEP, True)
        if found.shared <= max_shared // _BLOCKS_PER_SM:
            return found
    # Every pass reads again what does not fit; more blocks to a row would not change that.
    return found if found.shared <= max_shared else Tiling(found.blocks, found.segment, False)
