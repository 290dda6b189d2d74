"""Draw docs/concepts/pictures/*.svg from a prefix tree, its BSR rows and its plan, as the library makes them.

Three pictures show one decode step of eight samples of two problems behind the same instructions; one shows which
slots of pages the branches get when a sequence forks.

    python scripts/draw_trees.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from prefixkit.attention.bsr import BSR, MaskKind, decompose
from prefixkit.attention.plan import KINDS, make_plan
from prefixkit.attention.queries import StepTree, decode_tree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.tree.radix import PrefixTree

FOLDER = Path(__file__).parents[1] / "docs" / "concepts" / "pictures"
INSTRUCTIONS, PROBLEMS, SAMPLES = 400, {"problem A": 150, "problem B": 220}, 4
SHAPE = HeadShape(heads=9, kv_heads=3, head_dim=64, itemsize=4)  # SmolLM2-135M in float32
COLORS = ("#3f6fb5", "#d9822b", "#2f9e77", "#a15bb0")
KIND_COLORS = dict(zip((MaskKind.ALL, MaskKind.OWN, MaskKind.LIMIT), COLORS, strict=False))
INK, PALE = "#1f2933", "#e4e8ee"
ROW, SCALE = 22, 0.72  # of a query row, and of a token, in units of the picture


def example() -> PrefixTree:
    """Two problems behind the same instructions, four begun samples of each; two of the four share eight tokens."""
    tree = PrefixTree(num_pages=128, page_size=16)
    words = np.arange(10_000)
    for number, length in enumerate(PROBLEMS.values()):
        begin = 1_000 * (number + 1)
        prompt = tree.insert(np.concatenate((words[:INSTRUCTIONS], words[begin : begin + length])))
        for sample in range(SAMPLES):
            # The last two samples of each problem agree in their first eight tokens.
            own = begin + 400 + 100 * sample + words[: 24 + 13 * sample]
            alike = begin + 900 + words[:8] if sample > 1 else words[:0]
            tree.insert(np.concatenate((words[:INSTRUCTIONS], words[begin : begin + length], alike, own)))
        tree.release(prompt)
    return tree


def step_of(tree: PrefixTree) -> StepTree:
    """The decode step of all samples: a query row for the last token of each leaf."""
    snapshot = tree.snapshot()
    tree.mark_computed(tree.nodes(), snapshot.length)
    return decode_tree(tree.snapshot(), snapshot.sequence_node)


def tree_picture(step: StepTree) -> str:
    """Nodes as boxes: the width is the number of tokens, the height the number of samples below."""
    tree = step.snapshot
    names = ["instructions", *PROBLEMS]
    body, top = [text(0, 14, f"{tree.num_tokens:,} tokens stored; {tree.num_tokens_unshared:,} without sharing")], 24
    for node in range(tree.num_nodes):
        first, rows = step.first_row[node], int(tree.shared_by()[node])
        x, width = SCALE * tree.start[node], SCALE * tree.length[node]
        body.append(box(x, top + ROW * first, width, ROW * rows, COLORS[min(int(tree.depth()[node]), 3)]))
        if tree.length[node] > 100:
            name = names.pop(0)
            middle = top + ROW * (first + rows / 2)
            body += [
                text(x + width / 2, middle - 3, name, "middle", "#fff"),
                text(x + width / 2, middle + 12, f"{tree.length[node]} tokens for {rows}", "middle", "#fff"),
            ]
        elif rows == 1:
            body.append(text(x + width + 5, top + ROW * (first + 0.68), f"sample, {tree.length[node]} of its own"))
    return svg(740, top + ROW * step.queries.num_rows + 4, body)


def formats_picture(step: StepTree) -> str:
    """Query rows against the tree's tokens, node after node: the BSR row through which a query sees a token."""
    bsr = decompose(step, SHAPE, CPU_COST)
    offsets, top = np.concatenate(([0], np.cumsum(step.length))), 44
    scale = 700 / offsets[-1]
    body = [text(0, 14, "a column for each token of the tree, node after node; a line for each query row")]
    body += legend(
        (("shared-prefix rows: ALL", KIND_COLORS[MaskKind.ALL]), ("own-node rows: OWN", KIND_COLORS[MaskKind.OWN])), 30
    )
    height = ROW * step.queries.num_rows
    for offset in offsets:
        body.append(f'<path stroke="{PALE}" d="M{scale * offset:.1f} {top}v{height}"/>')
    for row in range(len(bsr.q_begin)):
        rows = int(bsr.q_end[row] - bsr.q_begin[row])
        for node, begin, end in segments(bsr, row, step):
            x, width = scale * (offsets[node] + begin), scale * (end - begin)
            color = KIND_COLORS[int(bsr.kind[row])]
            body.append(box(x, top + ROW * bsr.q_begin[row] + 1, width, ROW * rows - 2, color))
    return svg(702, top + height + 2, body)


def segments(bsr: BSR, row: int, step: StepTree) -> Iterable[tuple[int, int, int]]:
    """Node, first token and end of the KV that a BSR row reads."""
    for at in range(bsr.indptr[row], bsr.indptr[row + 1]):
        node = int(bsr.node[at])
        yield node, int(bsr.begin[at]), min(int(bsr.end[at]), int(step.length[node]))


def plan_picture(step: StepTree) -> str:
    """The work items of a plan, and the merge of each query row's partial states to its output."""
    bsr = decompose(step, SHAPE, CPU_COST)
    plan = make_plan([bsr], step.length, step.queries.num_rows)
    items, top, left, wide = plan.items, 56, 92, 62
    item_of = {int(item[2]) + n: at for at, item in enumerate(items) for n in range(item[1] - item[0])}
    body = [text(0, 14, f"{len(items)} work items (columns), {step.queries.num_rows} query rows (lines)")]
    body.append(text(0, 46, "tokens read:"))
    for at, item in enumerate(items):
        tokens = sum(end - first for _, first, end in segments(bsr, at, step))
        x, color = left + wide * at, KIND_COLORS[int(item[4] % KINDS)]
        body.append(text(x + wide / 2 - 4, 46, str(tokens), "middle"))
        body.append(box(x, top + ROW * item[0] + 2, wide - 8, ROW * (item[1] - item[0]) - 4, color))
    out = left + wide * len(items) + 8
    for query in range(step.queries.num_rows):
        y = top + ROW * (query + 0.5)
        body.append(text(0, y + 4, f"query {query}"))
        partials = plan.merge_indices[plan.merge_indptr[query] : plan.merge_indptr[query + 1]]
        columns = [left + wide * item_of[int(partial)] + wide / 2 - 4 for partial in partials]
        for from_x, to_x in zip(columns, [*columns[1:], out], strict=True):
            body.append(f'<path stroke="{INK}" fill="none" d="M{from_x:.0f} {y:.0f}H{to_x:.0f}"/>')
        body += [f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="#fff" stroke="{INK}"/>' for x in columns]
        body.append(text(out + 4, y + 4, f"output: {len(partials)} partial states merged"))
    return svg(out + 190, top + ROW * step.queries.num_rows + 4, body)


def pages_picture() -> str:
    """Pages of four slots before and after a sequence forks and its children grow."""
    tree, body, top = PrefixTree(num_pages=6, page_size=4), list[str](), 0
    prompt = tree.insert(np.arange(6))
    first, second = tree.fork(prompt, 2)
    for title in ("a prompt of 6 tokens; two forks of it copy nothing", "each fork after 3 tokens of its own"):
        if top:
            for token in range(3):
                tree.extend_each([first, second], [10 + token, 20 + token])
        snapshot = tree.snapshot()
        owner = dict[int, tuple[int, int]]()
        for node in range(snapshot.num_nodes):
            offsets = np.arange(snapshot.length[node])
            for offset, slot in zip(offsets, snapshot.slots(np.full_like(offsets, node), offsets), strict=True):
                owner[int(slot)] = node, int(snapshot.start[node] + offset)
        body.append(text(0, top + 14, title))
        for slot in range(6 * 4):
            x, y = 120 * (slot // 4) + 26 * (slot % 4), top + 24
            node, position = owner.get(slot, (-1, -1))
            body.append(box(x, y, 24, 24, COLORS[node] if node >= 0 else PALE))
            if node >= 0:
                body.append(text(x + 12, y + 17, str(position), "middle", "#fff"))
        body += [text(120 * page + 51, top + 66, f"page {page}", "middle") for page in range(6)]
        top += 84
    names = (("prompt", COLORS[0]), ("first fork", COLORS[1]), ("second fork", COLORS[2]), ("free", PALE))
    return svg(708, top + 16, [*body, *legend(names, top + 2)])


def legend(names: Iterable[tuple[str, str]], y: float) -> list[str]:
    x, made = 0.0, list[str]()
    for name, color in names:
        made += [box(x, y - 10, 12, 12, color), text(x + 17, y, name)]
        x += 40 + 7 * len(name)
    return made


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}"'
    return f'<rect {at} rx="2" fill="{color}" stroke="#fff" stroke-width="1"/>'


def text(x: float, y: float, of: str, anchor: str = "start", color: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{of}</text>'


def svg(width: float, height: float, body: Iterable[str]) -> str:
    """A picture on a white ground with a margin, so that it can be read on dark pages too."""
    margin = 10
    view = f"{-margin} {-margin} {width + 2 * margin:.0f} {height + 2 * margin:.0f}"
    ground = f'<rect x="{-margin}" y="{-margin}" width="100%" height="100%" rx="4" fill="#fff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" font-family="sans-serif" font-size="12">'
    return "\n".join((head, ground, *body, "</svg>")) + "\n"


def pictures() -> dict[str, str]:
    """Each picture by its name."""
    step = step_of(example())
    return {
        "tree": tree_picture(step),
        "formats": formats_picture(step),
        "plan": plan_picture(step),
        "pages": pages_picture(),
    }


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (FOLDER / f"{name}.svg").write_text(drawn)
        print(f"wrote {FOLDER / name}.svg")
