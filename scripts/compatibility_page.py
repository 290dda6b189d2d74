"""The page docs/reference/compatibility.md: measurements on a CPU, and records of benchmarks on GPUs.

python scripts/compatibility.py --write
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "results"
RESULTS, PAGE = RECORDED / "cpu_compatibility.json", ROOT / "docs" / "reference" / "compatibility.md"
COLUMNS = ("samples", "beams", "session", "prefix cache", "LoRA", "4 bits")
GPU_COLUMNS = ("samples", "beams", "graphs", "compiled", "prefix cache", "LoRA", "4 bits")
SHOWN = {
    "yes": "yes",
    "without a cache": "yes, but",
    "refused": "as before",
    "impossible": "no",
    "differs": "**differs**",
    "": "not measured",
}
INTRODUCTION = """\
# Compatibility

This page says what works with each model family, and where that was measured. `scripts/compatibility.py` wrote it. For
a model of your own, call `prefixkit.patch(model)`, which raises `UnsupportedModel` with the reason if the model's
structure is not supported; the first call checks everything else, and says in an error or a log line what is not
supported.

## On a CPU

For each `model_type` of transformers' causal language models, a tiny random model in float32 is compared with itself
without the patch, by its tokens.

| column | compares |
|---|---|
| samples | `generate(do_sample=True, num_return_sequences=3)` on the tree |
| beams | `generate(num_beams=3)` on the tree |
| session | a greedy call of `Session.generate` |
| prefix cache | the same call, after the session has computed half of the prompt |
| LoRA | a greedy `generate()` with random PEFT adapters on all linear layers |
| 4 bits | a greedy `generate()` with linear layers in NF4, by bitsandbytes |

*yes*: the same tokens. *yes, but*: the tokens of the model without a cache, from which those of its own cache differ.
*as before*: prefixkit refuses to use a tree and says why; the model's own `generate()` works as before the patch. *no*:
the model or the adapter cannot do this without prefixkit either. CUDA graphs and compiled layers exist on GPUs only.
[Model families](families.md) covers padded batches, windows and other options of configs, image-text models, and the
reason for each refused model."""
GPU_INTRODUCTION = """\
## On GPUs

The table lists what benchmarks have recorded with models of full layer sizes and random weights in bfloat16. The
kernels themselves are tested without models ([CUDA kernels](../developer/kernels.md#testing)), and `tests/gpu` runs
tiny models of further families: mistral, llama4_text, gemma4_text, mamba2. A family that is not in this table was not
measured on a GPU as a whole; a cell without a measurement says so. *eager*: the layers run without torch.compile,
because layers that keep states are not compiled."""


@dataclass(frozen=True)
class Recorded:
    """Records of a shape in the files of benchmarks/results: ``cells`` by column."""

    family: str
    shape: str
    machine: str
    files: tuple[str, ...]
    cells: dict[str, str] = field(default_factory=dict)


ALL = dict.fromkeys(("samples", "graphs", "compiled"), "yes")
STATES = {"samples": "yes", "graphs": "yes", "compiled": "eager", "prefix cache": "yes"}
GPU = (
    Recorded("gemma2", "gemma-2-9b", "H200", ("h200_windows.json",), ALL),
    Recorded("gemma3_text", "gemma-3-12b", "H200", ("h200_windows.json",), ALL),
    Recorded("glm4", "GLM-4-9B", "H200", ("h200_calls.json",), ALL),
    Recorded("gpt_oss", "gpt-oss-20b", "H200", ("h200_whole_calls.json", "h200_windows.json"), ALL),
    Recorded(
        "llama",
        "Llama-3.1-8B",
        "H200",
        ("h200_whole_calls.json", "h200_memory.json", "h200_generate.json"),
        ALL | {"beams": "yes", "prefix cache": "yes"},
    ),
    Recorded("llama", "Llama-3.2-1B", "H200", ("h200_calls.json", "h200_memory.json"), ALL | {"beams": "yes"}),
    Recorded("nemotron_h", "Nemotron-H-8B", "H200, H100", ("h200_hybrids.json", "h100_hybrids.json"), STATES),
    Recorded("qwen2", "Qwen2.5-7B", "H200", ("h200_calls.json",), ALL),
    Recorded("qwen3_5_text", "Qwen3.5-9B", "H200", ("h200_hybrids.json", "h200_hybrids_fla.json"), STATES),
    Recorded("qwen3_moe", "Qwen3-30B-A3B", "H200", ("h200_calls.json",), ALL),
    Recorded("qwen3_next", "Qwen3-Next-80B-A3B", "H200", ("h200_hybrids.json", "h200_hybrids_fla.json"), STATES),
)


def page(result: dict[str, Any]) -> str:
    """The whole page, from the measured JSON."""
    found: dict[str, dict[str, str]] = result["found"]
    told = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    head = f"Measured on {result['date']} at {result['commit']} by `{result['command']}`: {told}."
    counted = table(("", *COLUMNS), ((name, *counts(found, word)) for word, name in SHOWN.items()))
    rows = ((name, *(shown(cells.get(column, "")) for column in COLUMNS)) for name, cells in found.items())
    parts = [INTRODUCTION, textwrap.fill(head, 120, break_on_hyphens=False), counted, table(("family", *COLUMNS), rows)]
    gpu_rows = (
        (one.family, one.shape, one.machine, *(one.cells.get(column, SHOWN[""]) for column in GPU_COLUMNS), files(one))
        for one in GPU
    )
    parts += [GPU_INTRODUCTION, table(("family", "shape", "GPU", *GPU_COLUMNS, "recorded in"), gpu_rows)]
    return "\n\n".join(parts) + "\n"


def shown(word: str) -> str:
    return SHOWN.get(word, word)


def counts(found: dict[str, dict[str, str]], word: str) -> Iterable[str]:
    """How many families have this word in each column."""
    for column in COLUMNS:
        yield str(Counter(cells.get(column, "") for cells in found.values())[word])


def files(one: Recorded) -> str:
    return ", ".join(f"`{name}`" for name in one.files)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(result: dict[str, Any]) -> None:
    PAGE.write_text(page(result))
