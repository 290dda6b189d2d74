"""Whose tokens, which pages: a radix tree over token sequences, and the pages that hold their KV.  numpy only."""

from prefixkit.tree.match import Match
from prefixkit.tree.node import Node
from prefixkit.tree.pages import OutOfPages, PageAllocator
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence
from prefixkit.tree.snapshot import TreeSnapshot

__all__ = ["Match", "Node", "OutOfPages", "PageAllocator", "PrefixTree", "Sequence", "TreeSnapshot"]
