"""Products of one input, apart and as one: what `prefixkit/models/compile/packing.py` decides by.

    python benchmarks/products.py [--width 4096] [--rows 64,256,1024]

bf16 weights of a Llama-3.1-8B layer, in a CUDA graph over enough layers to come from memory; microseconds a layer, median.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tree_attention.timing import replay_us
from prefixkit.models.compile.packing import fills

LAYERS = 8
GROUPS = {"q, k, v": (4096, 1024, 1024), "k, v": (1024, 1024), "gate, up": (14336, 14336)}


def microseconds(columns: tuple[int, ...], rows: int, width: int) -> float:
    """A layer's products with so many columns each, one after the other."""
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    layers = [[torch.randn(n, width, device="cuda", dtype=torch.bfloat16) for n in columns] for _ in range(LAYERS)]
    return replay_us(lambda layer: [linear(x, weight) for weight in layers[layer]], LAYERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", default="32,64,128,256,512,1024")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device("cuda", torch.cuda.current_device())
    print(torch.cuda.get_device_name(), torch.__version__)
    for rows in map(int, options.rows.split(",")):
        for name, columns in GROUPS.items():
            apart, joint = (microseconds(given, rows, options.width) for given in (columns, (sum(columns),)))
            joins = sum(not fills(rows, n, device) for n in columns)
            print(
                f"{rows:5d} rows  {name:9s} apart {apart:6.1f} us  as one {joint:6.1f} us  prefixkit joins {joins}",
                flush=True,
            )


if __name__ == "__main__":
    main()
