"""What a sequence that grows has to hold where layers attend at positions in the cache: its pages stay few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.tree.changes.gaps import drop_between
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence as TreeSequence

# Tokens by which a sequence grows at most before pages are given back, and what then is worth a new plan.
MOST_AHEAD, LEAST_UNSEEN = 256, 64


@dataclass(frozen=True)
class Held:
    """Of a sequence, what some layer sees of it later.

    Attributes:
        sinks: How many of its first tokens.
        window: And of its last ones.
    """

    sinks: int
    window: int

    def most_pages(self, page_size: int) -> int:
        """Pages that a sample takes beside those of its prompt, whatever its length becomes."""
        grown = self.window + MOST_AHEAD + LEAST_UNSEEN + page_size
        return pages_for(self.sinks, page_size) + pages_for(grown, page_size) + 3

    def pages_left(self, sample: TreeSequence, page_size: int) -> int:
        """Of these, those that a sample may take yet, beside its leaf's and those of its first tokens above a gap."""
        node, taken = sample.node, 0
        if node.grows_in_place:
            taken = node.num_pages + node.reserved
            above = node.parent
            if above is not None and node.behind_gap and not (above.sequences or above.cached or above.children[1:]):
                taken += above.num_pages
        return max(0, self.most_pages(page_size) - taken)

    def release(self, tree: PrefixTree, sample: TreeSequence) -> None:
        """Give back pages of a sample, whose last token has no KV yet, once some hold what no layer sees any more."""
        end = sample.length - self.window
        if end - max(sample.node.start, self.sinks) >= LEAST_UNSEEN:
            drop_between(tree, sample, self.sinks, end)


def held_of(layers: Sequence[LayerKind]) -> Held | None:
    """What samples have to hold where layers attend at positions in the cache; None: everything, because none does, or
    others see all.
    """
    streaming = [kind.variant.streaming for kind in layers if kind.variant is not None]
    found = [one for one in streaming if one is not None]
    others = [kind.read_range for kind in layers if not kind.streams]
    if not found or any(seen.window is None and seen.chunk is None for seen in others):
        return None
    windows = [min(size for size in (seen.window, seen.chunk) if size is not None) for seen in others]
    return Held(max(one.sinks for one in found), max([one.window for one in found] + windows))
