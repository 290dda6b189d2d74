"""What a tree holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from prefixkit.tree.pages import PageAllocator
from prefixkit.tree.snapshot import TreeSnapshot


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Size and sharing of a tree.

    Attributes:
        sequences: live sequences.
        nodes: nodes, without the root.
        tokens_stored: distinct tokens held, each once.
        tokens_unshared: sum of the sequences' lengths: what would be held without sharing.
        pages_held: pages with at least one holder.
        pages_total: pages in the pool.
        max_depth: nodes on the longest path from a root to a leaf.
    """

    sequences: int
    nodes: int
    tokens_stored: int
    tokens_unshared: int
    pages_held: int
    pages_total: int
    max_depth: int

    @property
    def sharing(self) -> float:
        """Tokens of the sequences per token stored: 1.0 where nothing is shared (or nothing held)."""
        return self.tokens_unshared / self.tokens_stored if self.tokens_stored else 1.0


def measure(snapshot: TreeSnapshot, allocator: PageAllocator) -> TreeStats:
    ends = snapshot.sequence_node[snapshot.sequence_node >= 0]  # empty sequences end at no node
    return TreeStats(
        sequences=len(snapshot.sequence_id),
        nodes=snapshot.num_nodes,
        tokens_stored=snapshot.num_tokens,
        tokens_unshared=int((snapshot.start[ends] + snapshot.length[ends]).sum(dtype=int)),
        pages_held=allocator.num_pages - allocator.free,
        pages_total=allocator.num_pages,
        max_depth=int(snapshot.depth().max(initial=-1)) + 1,
    )
