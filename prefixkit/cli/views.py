"""What the terminal shows of a prefix tree and of a run's report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from prefixkit.cli.terminal import line
from prefixkit.engine.sharing_report import Report
from prefixkit.tree import Node, PrefixTree

WORDS = 44  # characters of a node's text that are shown
INDENT, LABEL = 4, 32  # columns of a level's indentation, and columns that a node's label needs
LEVELS = 4  # levels that are drawn in any terminal


def plant(
    sequences: Sequence[Sequence[int]], names: Sequence[str], page_size: int = 16
) -> tuple[PrefixTree, dict[int, str]]:
    """The tree of some sequences of token ids, and each sequence's name by its id in the tree."""
    tree = PrefixTree(sum(map(len, sequences)), page_size)
    return tree, {tree.insert(tokens).id: name for tokens, name in zip(sequences, names, strict=True)}


@dataclass
class _Parent:
    """A node of the picture whose children are being drawn."""

    picture: Tree
    drawn: int = 0
    hidden: int = 0  # children that are not drawn
    tokens: int = 0  # of the hidden children, and of all nodes below them

    def close(self) -> None:
        """Sum up what is hidden, after the last child."""
        if self.hidden:
            self.picture.add(line((f"… and {self.hidden:,} more, {self.tokens:,} tokens", "dim")))


def show_tree(
    tree: PrefixTree,
    names: Mapping[int, str],
    decode: Callable[[list[int]], str],
    title: str,
    console: Console,
    *,
    samples: int = 1,
    most: int = 10,
) -> None:
    """Draw the tree, a line for each node, down to the depth for which lines have columns; deeper nodes are summed up.

    Args:
        names: For each sequence id the text that is shown where the sequence ends.
        samples: Samples that every sequence will have; 1 if the sequences are the samples.
        most: How many children of a node are drawn; the others are summed up.
    """
    picture = Tree(line((title, "bold")))
    levels = max(LEVELS, (console.width - LABEL) // INDENT)
    snapshot = tree.snapshot()
    columns = tree.nodes(), snapshot.depth().tolist(), snapshot.shared_by().tolist()
    path = [_Parent(picture)]  # the node's ancestors that are drawn
    for node, depth, shared_by in zip(*columns, strict=True):
        while len(path) > depth + 1:
            path.pop().close()
        parent, is_child = path[-1], len(path) > depth  # else it is below a child that is not drawn
        if is_child and depth < levels and parent.drawn < most:
            parent.drawn += 1
            path.append(_Parent(parent.picture.add(_label(node, shared_by * samples, names, decode))))
        else:
            parent.hidden += is_child
            parent.tokens += node.length
    while path:
        path.pop().close()
    console.print(picture, no_wrap=True, overflow="ellipsis")


def _label(node: Node, shared: int, names: Mapping[int, str], decode: Callable[[list[int]], str]) -> Text:
    parts: list[str | tuple[str, str]] = [(f"{node.length:,} token{'s' * (node.length != 1)}", "cyan")]
    if shared > 1:
        parts += ["  ", (f"shared by {shared:,}", "green")]
    ending = [names[key] for key in node.sequences if key in names]
    if ending:
        more = f" and {len(ending) - 3} more" if len(ending) > 3 else ""
        parts.append("  " + ", ".join(ending[:3]) + more)
    return line(*parts, "  ", (_words(node.tokens.tolist(), decode), "dim"))


def _words(tokens: list[int], decode: Callable[[list[int]], str]) -> str:
    """The first and last words of a text, on one line."""
    if len(tokens) <= WORDS:
        text = " ".join(decode(tokens).split())
        if len(text) <= WORDS:
            return f"“{text}”" if text else ""
    head, tail = (" ".join(decode(part).split()) for part in (tokens[:WORDS], tokens[-WORDS:]))
    return f"“{head[: WORDS // 2]} … {tail[-WORDS // 2 :]}”"


def show_report(report: Report, title: str, console: Console) -> None:
    """The tokens computed, the KV held and the KV read, compared with a plain batch."""
    console.print(line((title, "bold")))
    console.print(saved_table(report.rows()))
    if report.bytes_per_state:
        console.print(line(report.states_held))


def saved_table(rows: Iterable[Sequence[str]]) -> Table:
    """A table whose rows are a quantity, prefixkit's number, a plain batch's, and their ratio."""
    table = Table("")
    for name in ("prefixkit", "plain batch", "saved"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(line, row))
    return table


def branches(
    tree: PrefixTree, decode: Callable[[list[int]], str], samples: int, most: int = 200, levels: int = 16
) -> list[dict[str, Any]]:
    """The tree as nested JSON values: ``tokens``, ``shared_by``, ``text`` and ``children`` of each node.

    Args:
        samples: Samples that every sequence has.
        most: The most children of a node; the others are left out.
        levels: The most levels of the tree; deeper nodes are left out.
    """
    snapshot = tree.snapshot()
    roots: list[dict[str, Any]] = []
    path: list[list[dict[str, Any]]] = [roots]  # the children of each ancestor
    columns = tree.nodes(), snapshot.depth().tolist(), snapshot.shared_by().tolist()
    for node, depth, shared_by in zip(*columns, strict=True):
        if depth >= levels or depth >= len(path):
            continue
        del path[depth + 1 :]
        if len(path[depth]) < most:
            text = _words(node.tokens.tolist(), decode)
            shared = shared_by * samples
            own: dict[str, Any] = {"tokens": node.length, "shared_by": shared, "text": text, "children": []}
            path[depth].append(own)
            path.append(own["children"])
    return roots
