"""The page docs/reference/families.md, from the results of scripts/families.py."""

from __future__ import annotations

import ast
import platform
import re
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

import prefixkit

VERDICTS = ["untried", "tree", "partly", "refused", "error", "wrong"]  # from the best to the worst
WIDTH = 120
INTRODUCTION = """\
`python scripts/families.py --write docs/reference/families.md` wrote this page. For each `model_type` it makes a tiny
model with random weights, generates with it, patches it by `patch(model, tree_cache="always")`, generates again, and
compares tokens and logits: greedily from a left-padded batch of three texts with a common beginning, with three beams,
with three samples of a text without padding, and once more with the `token_type_ids` or `mm_token_type_ids` of zeros
that its processor or tokenizer makes for text. Each config is tried with its options: short windows or chunks and none,
values of other sizes than keys, layers that share KV, global heads of another size, queries scaled by position, loops
of which only the last caches KV. The verdict is the worst over all variants that transformers can build. Logits may
differ by 0.0001 of their spread.

*Tree*: the calls run on the tree, with the same tokens and logits. *Refused*: prefixkit gives the reason, and the model
runs on transformers' own cache with the same result. *Partly*: the named calls or options are refused, and all others
run on the tree. *Wrong*: other tokens or logits. *Error*: an exception that the model without the patch does not raise.
*Untried*: transformers cannot build the model tiny, or the model cannot generate from text alone. Messages are cut
short here; the script prints them in full."""
# Reasons for a fallback, by patterns of messages; the first that matches counts.
CAUSES = [
    ("an encoder-decoder", r"is an encoder-decoder|EncoderDecoderCache"),
    ("attention that is bidirectional or crosses to an encoder", r"is bidirectional"),
    ("a second decoder", r"both keep the KV of layer|one attention for each layer"),
    ("a recurrent state, or a latent, in some layers", r"a recurrent state, a latent"),
    ("the state of a convolution before attention", r"asks its cache for 'get_conv_state'"),
    ("keys or values changed after they are cached", r"attends over other keys and values"),
    ("loops that attend to the KV of another", r"recurrent_kv_cache_mode"),
    ("no attention at all", r"; it has no attention"),
    ("attention code of their own", r"no layer both fills a KV cache and calls"),
    ("layers that ask the mask or the cache", r"asks its cache for|cannot run a step over a tree"),
    ("positions that count padding", r"the model scales queries after"),
    ("positions that a tree does not have", r"no position_ids"),
]
OTHER = "something else"


@dataclass
class Found:
    """The result for a model_type; ``notes`` are about transformers alone."""

    verdict: str
    reason: str = ""
    notes: list[str] = field(default_factory=list)


def document(found: dict[tuple[str, str], Found], lists: dict[str, str], older: Older | None = None) -> str:
    """The results as Markdown.

    Args:
        found: Results by the kind of list, and the model_type in it.
        lists: The name of each kind's list.
        older: The lists of an older transformers.
    """
    versions = {"transformers": transformers, "torch": torch, "prefixkit": prefixkit}
    told = ", ".join(f"{name} {module.__version__}" for name, module in versions.items())
    measured = f"Measured on {time.strftime('%Y-%m-%d')} with {told}, Python {platform.python_version()}, on a CPU."
    parts = ["# Which models run on a tree", INTRODUCTION, measured]
    for kind, names in lists.items():
        here = {model_type: one for (its_kind, model_type), one in found.items() if its_kind == kind}
        parts += [f"## {kind}", f"`{names}`: {counts(found, kind)}."]
        parts.append(listed("On the tree", (name for name, one in here.items() if one.verdict == "tree")))
        if older is not None and (lacking := [name for name in here if name not in older.types[kind]]):
            parts.append(listed(f"Transformers {older.version} lacks {len(lacking)} of all", lacking))
        parts += [*causes(here), table(("model_type", "verdict", "reason"), rows(here))]
    notes = [(name, "; ".join(one.notes)) for (_, name), one in found.items() if one.notes]
    parts.append(
        "## Where transformers disagrees with itself\n\nFor these models a comparison with transformers proves little."
    )
    parts.append(table(("model_type", "transformers without a patch"), notes))
    return "\n\n".join(parts) + "\n"


def counts(found: dict[tuple[str, str], Found], kind: str) -> str:
    """How many entries of a list have each verdict."""
    number = Counter(one.verdict for (its_kind, _), one in found.items() if its_kind == kind)
    return ", ".join(
        f"{number[verdict]} {verdict}" for verdict in ("tree", "partly", "refused", "wrong", "error", "untried")
    )


def listed(what: str, model_types: Iterable[str]) -> str:
    """A sentence that names model types, in lines."""
    return textwrap.fill(f"{what}: {', '.join(model_types)}.", WIDTH, break_on_hyphens=False)


def rows(here: dict[str, Found]) -> Iterator[tuple[str, str, str]]:
    """The models of a list that do not, or not always, run on the tree."""
    return ((name, one.verdict, one.reason) for name, one in here.items() if one.verdict != "tree")


def causes(here: dict[str, Found]) -> Iterator[str]:
    """A table of reasons in a list, and the model types behind each of its numbers."""
    by_cause = defaultdict[str, list[str]](list)
    for name, one in here.items():
        for cause in causes_of(one.reason) if one.verdict in ("refused", "partly") else ():
            by_cause[cause].append(name)
    if by_cause:
        ordered = sorted(by_cause.items(), key=lambda of: -len(of[1]))
        yield "Reasons why model types are refused, always or partly; some have several."
        yield table(
            ("cause", "number", "model types"), ((cause, str(len(of)), ", ".join(of)) for cause, of in ordered), 0
        )


def causes_of(reason: str) -> list[str]:
    """The causes by each of the messages of which a reason is composed."""
    found = [next((cause for cause, says in CAUSES if re.search(says, one)), "") for one in reason.split("; with ")]
    return list(dict.fromkeys(filter(None, found))) or [OTHER]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], width: int = WIDTH) -> str:
    """A table of Markdown, the last cells shortened to lines of ``width`` columns, if that is not 0."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for *cells, last in rows:
        begin, last = f"| {' | '.join(cells)} | ", last.replace("|", "\\|")
        room = width - len(begin) - 2
        lines.append(f"{begin}{last if not width or len(last) <= room else last[: room - 4] + ' ...'} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Older:
    """An older transformers: its version, and its model types by the kind of list."""

    version: str
    types: dict[str, set[str]]


def types_of(sources: Path, lists: dict[str, str]) -> Older:
    """The lists of another transformers, read from its sources, which are not imported."""
    tree = ast.parse((sources / "models" / "auto" / "modeling_auto.py").read_text())
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    types = dict[str, set[str]]()
    for kind, name in lists.items():
        pairs = (one for one in ast.walk(assigned[name]) if isinstance(one, ast.Tuple))
        types[kind] = {str(pair.elts[0].value) for pair in pairs if isinstance(pair.elts[0], ast.Constant)}
    version = re.search(r'__version__ = "([^"]+)"', (sources / "__init__.py").read_text())
    return Older(version[1] if version else "of before", types)
