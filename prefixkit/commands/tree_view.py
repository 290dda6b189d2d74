"""A picture of a prefix tree in the terminal: who shares what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from prefixkit.tree import PrefixTree
from prefixkit.tree.draw import Row, rows

WORDS = 44  # characters of a node's text that are shown


@dataclass(frozen=True)
class _Branch:
    row: Row
    children: list[_Branch] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.row.tokens) + sum(child.tokens for child in self.children)


@dataclass(frozen=True)
class View:
    """How a tree is drawn.

    Attributes:
        names: Sequence id to the name shown where the sequence ends.
        decode: Token ids to text.
        samples: Samples that every sequence will have; 1 where the sequences are the samples.
        most: Children of a node that are drawn; the others are summed up.
    """

    names: Mapping[int, str]
    decode: Callable[[list[int]], str]
    samples: int = 1
    most: int = 10


def show_tree(tree: PrefixTree, view: View, title: str, console: Console) -> None:
    """Draw the tree, one line for each node."""
    picture = Tree(f"[bold]{escape(title)}[/bold]")
    _add(picture, _nest(tree), view)
    console.print(picture, no_wrap=True, overflow="ellipsis")


def _nest(tree: PrefixTree) -> list[_Branch]:
    """The rows of `rows`, each below its parent."""
    roots: list[_Branch] = []
    path: list[_Branch] = []
    for row in rows(tree):
        branch = _Branch(row)
        del path[row.depth :]
        (path[-1].children if path else roots).append(branch)
        path.append(branch)
    return roots


def _add(picture: Tree, branches: list[_Branch], view: View) -> None:
    for branch in branches[: view.most]:
        _add(picture.add(_label(branch.row, view)), branch.children, view)
    if hidden := branches[view.most :]:
        tokens = sum(branch.tokens for branch in hidden)
        picture.add(f"[dim]… and {len(hidden)} more, {tokens:,} tokens[/dim]")


def _label(row: Row, view: View) -> str:
    length, shared = len(row.tokens), row.shared_by * view.samples
    parts = [f"[cyan]{length:,} token{'s' * (length != 1)}[/cyan]"]
    if shared > 1:
        parts.append(f"[green]shared by {shared:,}[/green]")
    ending = [view.names[key] for key in row.node.sequences if key in view.names]
    if ending:
        more = f" and {len(ending) - 3} more" if len(ending) > 3 else ""
        parts.append(escape(", ".join(ending[:3]) + more))
    return "  ".join(parts) + f"  [dim]{escape(_words(row, view))}[/dim]"


def _words(row: Row, view: View) -> str:
    """The node's first and last words, on one line."""
    tokens = [int(token) for token in row.tokens]
    if len(tokens) <= WORDS:
        text = " ".join(view.decode(tokens).split())
        if len(text) <= WORDS:
            return f"“{text}”" if text else ""
    half = WORDS // 2
    head, tail = (" ".join(view.decode(part).split()) for part in (tokens[:WORDS], tokens[-WORDS:]))
    return f"“{head[:half]} … {tail[-half:]}”"
