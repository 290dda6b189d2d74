"""Draw docs/tutorials/masks/*.svg, a picture of each variant of the gallery, from the variant itself.

A row is a query, a column a key: visible scores are filled, the paler the more a bias lowers the score.  The picture of
a function of the score alone is its graph.

    python scripts/draw_masks.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from prefixkit import variants
from prefixkit.attention.variants import Variant, compose, variant

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials" / "masks"
SIZE = 24  # queries and keys
FILL, BACKGROUND = "#2f6fbb", "#e9ecef"
TREE = (-1, 0, 0, 1, 1, 2, 5, 5, -1, 8, 8, 10)
IDS = torch.tensor([0] * 7 + [1] * 5 + [0] * 3 + [2] * 9)
BSR = torch.tensor([0, 1, 3, 4, 7, 9, 11]), torch.tensor([0, 0, 1, 2, 0, 2, 3, 3, 4, 0, 5])


def _blocks() -> Variant:
    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < 10)

    return variants.from_block_mask(create_block_mask(within, None, None, SIZE, SIZE, device="cpu", BLOCK_SIZE=4))


def _joined() -> Variant:
    own, window = (variants.as_mask_mod(each) for each in (variants.document(IDS), variants.sliding_window(5)))
    return variant(mask_mod=variants.or_masks(own, window))


GALLERY: dict[str, Callable[[], Variant]] = {
    "causal": variants.causal,
    "full": variants.full,
    "alibi": lambda: variants.alibi([0.15]),
    "sliding_window": lambda: variants.sliding_window(7),
    "chunked": lambda: variants.chunked(6),
    "prefix_lm": lambda: variants.prefix_lm(8),
    "soft_cap": lambda: variants.soft_cap(20.0),
    "document": lambda: variants.document(IDS),
    "document_both_ways": lambda: variants.document(IDS, causal=False),
    "dilated_window": lambda: variants.dilated_window(4, 3),
    "streaming": lambda: variants.streaming(3, 6),
    "draft_tree": lambda: variants.draft_tree(TREE, SIZE - len(TREE)),
    "natten_1d": lambda: variants.natten_1d(SIZE, 7),
    "natten_2d": lambda: variants.natten_2d(4, 6, 3, tile=(2, 3)),
    "natten_2d_rows": lambda: variants.natten_2d(4, 6, 3, tile=1),
    "block_mask": lambda: variants.block_mask(*BSR, 4, 4),
    "from_block_mask": _blocks,
    "composed": lambda: compose(variants.document(IDS), variants.sliding_window(5), variants.alibi([0.15])),
    "or_masks": _joined,
}


def draw(of: Variant) -> str:
    """The SVG of a variant, for one sequence and one head."""
    return _graph(of) if of.score_mods and not of.mask_mods and of.biases is None else _mask(of)


def _mask(of: Variant) -> str:
    idx, none = torch.arange(SIZE), torch.zeros((), dtype=torch.int64)
    shown = variants.as_mask_mod(of)(none, none, idx[:, None], idx).expand(SIZE, SIZE)
    bias = of.change(torch.zeros(()), none, none, idx[:, None], idx).expand(SIZE, SIZE).exp()
    cells = [
        f'<path fill-opacity="{opacity:.2f}" d="M{begin} {row}h{end - begin}v1H{begin}z"/>'
        for row in range(SIZE)
        for opacity, begin, end in _runs((bias * shown)[row])
        if opacity
    ]
    return _svg(SIZE, f'<g fill="{FILL}">{"".join(cells)}</g>')


def _runs(row: Tensor) -> list[tuple[float, int, int]]:
    """Runs of equal neighbors: their opacity, the first, and the index after the last."""
    found, begin = [], 0
    for opacity, run in groupby(round(float(value), 2) for value in row):
        end = begin + len(list(run))
        found.append((opacity, begin, end))
        begin = end
    return found


def _graph(of: Variant) -> str:
    """The graph of the new score over the old one, both from -60 to 60."""
    score, none = torch.linspace(-60, 60, 49), torch.zeros((), dtype=torch.int64)
    new = of.change(score, none, none, none, none)
    points = " ".join(f"{x / 5 + 12:.2f},{12 - y / 5:.2f}" for x, y in zip(score.tolist(), new.tolist(), strict=True))
    axes = f'<path stroke="{FILL}" stroke-opacity=".3" stroke-width=".15" d="M0 12h24M12 0v24"/>'
    return _svg(SIZE, f'{axes}<polyline fill="none" stroke="{FILL}" stroke-width=".5" points="{points}"/>')


def _svg(size: int, content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="144" height="144" '
        f'shape-rendering="geometricPrecision"><rect width="{size}" height="{size}" fill="{BACKGROUND}"/>{content}'
        "</svg>\n"
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in GALLERY.items():
        (FOLDER / f"{name}.svg").write_text(draw(make()))
