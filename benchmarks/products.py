"""Products of one input, apart and packed into one: what the compiled layers decide by.

    python -m benchmarks.products [--width 4096] [--rows 64,256,1024] [--out FILE]

bf16 weights of a Llama-3.1-8B layer, in a CUDA graph over enough layers to come from memory; microseconds a layer.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from benchmarks.runner import Run, arguments, replay_us
from prefixkit.models.compile.packing import fills

LAYERS = 8
GROUPS = {"q, k, v": (4096, 1024, 1024), "k, v": (1024, 1024), "gate, up": (14336, 14336)}


def microseconds(columns: tuple[int, ...], rows: int, width: int) -> float:
    """A layer's products with so many columns each, one after the other."""
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    layers = [[torch.randn(n, width, device="cuda", dtype=torch.bfloat16) for n in columns] for _ in range(LAYERS)]
    return round(replay_us(lambda layer: [linear(x, weight) for weight in layers[layer]], LAYERS), 2)


def main() -> None:
    options = arguments(__doc__, width=4096, rows=[32, 64, 128, 256, 512, 1024])
    torch.set_grad_enabled(False)
    run, device = Run(options), torch.device("cuda", torch.cuda.current_device())
    for rows in options.rows:
        for name, columns in GROUPS.items():
            apart, packed = (microseconds(given, rows, options.width) for given in (columns, (sum(columns),)))
            packs = sum(not fills(rows, n, device) for n in columns)
            text = f"{rows:5d} rows  {name:9s} apart {apart:6.1f} us  as one {packed:6.1f} us  prefixkit packs {packs}"
            run.add("results", {"rows": rows, "of": name, "apart_us": apart, "as_one_us": packed, "packs": packs}, text)
    run.finish()


if __name__ == "__main__":
    main()
