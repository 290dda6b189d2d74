"""Which tokens a growing sequence has to hold if layers attend at positions in the cache: its pages stay few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.tree.changes.gaps import drop_between
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence as TreeSequence

# The most tokens that a sequence grows by before pages are released, and the fewest unseen tokens worth a new plan.
MOST_AHEAD, LEAST_UNSEEN = 256, 64


@dataclass(frozen=True)
class Held:
    """The tokens of a sequence that some layer will still see.

    Attributes:
        sinks: The number of first tokens.
        window: The number of last tokens.
    """

    sinks: int
    window: int

    def most_pages(self, page_size: int) -> int:
        """An upper bound of the pages of a sample, besides those of its prompt, at any length."""
        grown = self.window + MOST_AHEAD + LEAST_UNSEEN + page_size
        return pages_for(self.sinks, page_size) + pages_for(grown, page_size) + 3

    def pages_left(self, sample: TreeSequence, page_size: int) -> int:
        """Of these, the pages that a sample may still take, besides its leaf's and its first tokens' above a gap."""
        node, taken = sample.node, 0
        if node.grows_in_place:
            taken = node.num_pages + node.reserved
            above = node.parent
            if above is not None and node.behind_gap and not (above.sequences or above.cached or above.children[1:]):
                taken += above.num_pages
        return max(0, self.most_pages(page_size) - taken)

    def release(self, tree: PrefixTree, sample: TreeSequence) -> None:
        """Release pages of a sample that no layer sees any more, if they are enough; its last token has no KV yet."""
        end = sample.length - self.window
        if end - max(sample.node.start, self.sinks) >= LEAST_UNSEEN:
            drop_between(tree, sample, self.sinks, end)


def held_of(layers: Sequence[LayerKind]) -> Held | None:
    """Which tokens samples have to hold if layers attend at positions in the cache; None: all, because no layer
    does so, or some other layer sees all tokens.
    """
    streaming = [kind.variant.streaming for kind in layers if kind.variant is not None]
    found = [one for one in streaming if one is not None]
    others = [kind.read_range for kind in layers if not kind.streams]
    if not found or any(seen.window is None and seen.chunk is None for seen in others):
        return None
    windows = [min(size for size in (seen.window, seen.chunk) if size is not None) for seen in others]
    return Held(max(one.sinks for one in found), max([one.window for one in found] + windows))
