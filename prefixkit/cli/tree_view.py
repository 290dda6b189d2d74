"""A picture of a prefix tree in the terminal: who shares what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from prefixkit.cli.terminal import line
from prefixkit.tree import Node, PrefixTree

WORDS = 44  # characters of a node's text that are shown
# A level is indented by so many columns, and a node needs so many to say anything.
INDENT, LABEL = 4, 32
LEVELS = 4  # that are drawn in any terminal


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


@dataclass
class _Parent:
    """A node of the picture whose children are being drawn, and what is left out below it.

    Attributes:
        hidden: Children that are not drawn.
        tokens: Tokens of these and of all nodes below them.
    """

    picture: Tree
    drawn: int = 0
    hidden: int = 0
    tokens: int = 0

    def close(self) -> None:
        """All children have been seen."""
        if self.hidden:
            self.picture.add(line((f"… and {self.hidden:,} more, {self.tokens:,} tokens", "dim")))


def show_tree(tree: PrefixTree, view: View, title: str, console: Console) -> None:
    """Draw the tree, a line for each node, as deep as lines have columns for; what is deeper is summed up."""
    picture = Tree(line((title, "bold")))
    levels = max(LEVELS, (console.width - LABEL) // INDENT)
    snapshot = tree.snapshot()
    columns = tree.nodes(), snapshot.depth().tolist(), snapshot.shared_by().tolist()
    path = [_Parent(picture)]  # the node's ancestors that are drawn
    for node, depth, shared_by in zip(*columns, strict=True):
        while len(path) > depth + 1:
            path.pop().close()
        parent = path[-1]
        if len(path) <= depth:  # below a node that is left out
            parent.tokens += node.length
        elif depth < levels and parent.drawn < view.most:
            parent.drawn += 1
            path.append(_Parent(parent.picture.add(_label(node, shared_by * view.samples, view))))
        else:
            parent.hidden += 1
            parent.tokens += node.length
    while path:
        path.pop().close()
    console.print(picture, no_wrap=True, overflow="ellipsis")


def _label(node: Node, shared: int, view: View) -> Text:
    parts: list[str | tuple[str, str]] = [(f"{node.length:,} token{'s' * (node.length != 1)}", "cyan")]
    if shared > 1:
        parts += ["  ", (f"shared by {shared:,}", "green")]
    ending = [view.names[key] for key in node.sequences if key in view.names]
    if ending:
        more = f" and {len(ending) - 3} more" if len(ending) > 3 else ""
        parts.append("  " + ", ".join(ending[:3]) + more)
    return line(*parts, "  ", (_words(node, view), "dim"))


def _words(node: Node, view: View) -> str:
    """The node's first and last words, on one line."""
    tokens = [int(token) for token in node.tokens]
    if len(tokens) <= WORDS:
        text = " ".join(view.decode(tokens).split())
        if len(text) <= WORDS:
            return f"“{text}”" if text else ""
    half = WORDS // 2
    head, tail = (" ".join(view.decode(part).split()) for part in (tokens[:WORDS], tokens[-WORDS:]))
    return f"“{head[:half]} … {tail[-half:]}”"
