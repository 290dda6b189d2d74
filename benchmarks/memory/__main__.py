"""The use of a session's memory: known prefixes, preemption, admission by present need, pages, beams.

    python -m benchmarks.memory --parts prefix,copies,swap,pressure,beams,pages --samples 16
        --page-sizes 1,8,16,32,128 --turns 2 --seconds 130 --out FILE    # one line, on a GPU: about 140 s
    python -m benchmarks.memory --device cpu --parts fill,policies --out FILE

Random weights (``shapes.toml``), bf16 on a GPU, float32 on a CPU; ``--shape`` takes one shape for every part.

*prefix*: seconds to the first token of a prompt of ``--few-shot`` tokens and ``--own`` more, cold, and with the
few-shot known; then ``--calls`` calls in a pool that holds ``--few-shot`` + 2,048 tokens: memory after each quarter.
*copies*: KV of this many tokens to host memory and back, microseconds a token, by page size; and computing it again.
*swap*: 8 prompts, 8 samples each, in a pool for all prompts and half of the samples' final KV, preempting by swap, by
recomputing, or by the cheaper of both; a session's first call, which captures graphs and allocates pinned memory, and
``--turns`` more, with other prompts; counts are those of the last call.
*pressure*: samples of 100 to 300 tokens with ``max_new_tokens`` of 1,024, in a pool in which ``--reserved`` samples
could reserve 1,024 tokens each: with prefixkit's admission, and with at most ``--reserved`` samples running.
``function`` ends samples by a stop function, at evenly spread lengths; ``ids`` by 1 in 200 of all tokens, pipelined.
*pages*: a decode step of 4 x 16 samples of prompts of 1,000 tokens, by page size.
*beams*: a beam search and transformers' own: seconds, GiB without the weights, bytes of KV copied.
*fill*, *policies*: the tree alone, see ``benchmarks.memory.tree``.

Predictions, and which of them were made before a run, are in ``benchmarks/README.md``.
"""

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.memory.calls import beams, page_speed, prefix
from benchmarks.memory.measured import Measured
from benchmarks.memory.preemption import copies, pressure, swap
from benchmarks.memory.tree import measure_fill, measure_policies
from benchmarks.runner import OUT_OF_TIME, Row, Run, arguments, failure, free_memory
from benchmarks.shapes import SHAPES

PARTS = ["prefix", "copies", "swap", "pressure", "beams", "pages", "fill", "policies"]
OWN_SHAPES = {
    "cuda": {"prefix": "Llama-3.1-8B", "copies": "Llama-3.1-8B", "swap": "Llama-3.1-8B", "": "Llama-3.2-1B"},
    "cpu": {"prefix": "SmolLM2-135M", "copies": "SmolLM2-135M", "": "small"},
}
PAGE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128]


def rows_of(part: str, on: Measured, options: Any) -> Iterator[Row]:
    """The rows of a part that needs a model, each as it is measured."""
    if part == "prefix":
        yield from prefix(on, options.few_shot, options.own, options.calls, options.turns)
    elif part == "copies":
        yield from copies(on, options.lengths, options.turns)
    elif part == "swap":
        yield from swap(on, options.swap_prompts, options.swap_new, options.turns + 1)
    elif part == "pressure":
        for ends in options.ends:
            yield pressure(on, ends, options.reserved, options.prompts, options.samples, options.max_new)
    elif part == "pages":
        for page_size in options.page_sizes:
            yield page_speed(on, page_size, options.few, options.many, options.turns)
    elif part == "beams":
        for count in options.beams:
            yield beams(on, count, options)


def measure(run: Run, part: str, on: Measured, options: Any) -> None:
    """Add a part's rows until the time is over; a failure is a row too, and the next part begins."""
    rows = rows_of(part, on, options)
    began = time.monotonic()
    try:
        while True:
            if run.left < 0:
                return run.add(part, {"shape": on.shape.name, "skipped": OUT_OF_TIME})
            row = next(rows, None)
            if row is None:
                return
            taken = round(time.monotonic() - began, 1)
            run.add(part, {"shape": on.shape.name, **row, "part_s": taken})
    except Exception as error:
        run.add(part, {"shape": on.shape.name, "failed": failure(error)})
    finally:
        rows.close()
        free_memory()


def main() -> None:
    sizes: Row = {"few_shot": 4096, "own": 64, "calls": 100, "lengths": [64, 256, 1024, 4096]}
    sizes |= {"swap_prompts": [256, 2048], "swap_new": 256, "reserved": 16, "prompts": 16, "samples": 32}
    sizes |= {"max_new": 1024, "ends": ["function", "ids"], "page_sizes": PAGE_SIZES, "few": 8, "many": 40}
    sizes |= {"beams": [2, 4, 8, 16], "beam_prompt": 2048, "beam_new": 128}
    sizes |= {"fill_prompts": 64, "fill_samples": 16, "fill_length": 1000, "zipf_prompts": 200, "zipf_requests": 4000}
    limits: Row = {"turns": 3, "seconds": {"type": float, "help": "begin nothing more after so long"}}
    options = arguments(__doc__, device="cuda", shape="", parts=PARTS, **limits, **sizes)
    options.new = options.beam_new  # what `benchmarks.generate` calls it
    run, chosen = Run(options, options.device), [part for part in PARTS if part in options.parts]
    own = OWN_SHAPES[options.device]
    names = {part: options.shape or own.get(part, own[""]) for part in chosen if part not in ("fill", "policies")}
    for name in dict.fromkeys(names.values()):
        on = Measured(SHAPES[name], options)
        for part in [part for part, of in names.items() if of == name]:
            measure(run, part, on, options)
        del on
        free_memory()
    if "fill" in chosen:
        measure_fill(run, options.page_sizes, options.fill_prompts, options.fill_samples, options.fill_length)
    if "policies" in chosen:
        measure_policies(run, options.zipf_prompts, options.zipf_requests)
    run.finish("seconds")


if __name__ == "__main__":
    main()
