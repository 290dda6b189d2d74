"""Products of one input, apart and packed into one: what the compiled layers decide by.

    python benchmarks/products.py [--width 4096] [--rows 64,256,1024] [--out FILE]

bf16 weights of a Llama-3.1-8B layer, in a CUDA graph over enough layers to come from memory; microseconds a layer, median.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.runner import Run, arguments, numbers, replay_us
from prefixkit.models.compile.packing import fills

LAYERS = 8
GROUPS = {"q, k, v": (4096, 1024, 1024), "k, v": (1024, 1024), "gate, up": (14336, 14336)}


def microseconds(columns: tuple[int, ...], rows: int, width: int) -> float:
    """A layer's products with so many columns each, one after the other."""
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    layers = [[torch.randn(n, width, device="cuda", dtype=torch.bfloat16) for n in columns] for _ in range(LAYERS)]
    return replay_us(lambda layer: [linear(x, weight) for weight in layers[layer]], LAYERS)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=numbers, default="32,64,128,256,512,1024")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    run, device = Run(options), torch.device("cuda", torch.cuda.current_device())
    for rows in options.rows:
        for name, columns in GROUPS.items():
            apart, packed = (microseconds(given, rows, options.width) for given in (columns, (sum(columns),)))
            packs = sum(not fills(rows, n, device) for n in columns)
            text = f"{rows:5d} rows  {name:9s} apart {apart:6.1f} us  as one {packed:6.1f} us  prefixkit packs {packs}"
            row = {"rows": rows, "of": name, "apart_us": round(apart, 2), "as_one_us": round(packed, 2), "packs": packs}
            run.add("results", row, text)
    run.finish()


if __name__ == "__main__":
    main()
