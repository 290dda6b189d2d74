"""Whose tokens, which pages: a radix tree over token sequences, and the pages that hold their KV.  numpy only."""

from prefixkit.tree.match import Match
from prefixkit.tree.node import Node, Sequence
from prefixkit.tree.pages import OutOfPages, PageAllocator
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.snapshot import TreeSnapshot

__all__ = ["Match", "Node", "OutOfPages", "PageAllocator", "PrefixTree", "Sequence", "TreeSnapshot"]
