"""The same script before and after ``prefixkit.patch``: whole calls of ``model.generate()``, and their peak memory.

    python -m benchmarks.generate --shape SmolLM2-135M --device cpu --prompts 600 --new 32 --samples 1,16 --beams 4
    python -m benchmarks.generate --prompts 2048 --new 128 --samples 64 --beams 4,8,16

*stock*: transformers with its default attention; *expand*: the prompt computed once, its cache repeated by hand;
*batch*: ``generate_batch``, on a GPU; *session*: ``prefixkit.Session``; *tree*: the same call as *stock*, patched.
Random weights; one prompt, which differs from call to call, and as many new tokens in each call.  ``s`` is the median
of ``--turns`` calls after the first, ``peak_gib`` the peak without the weights.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

import prefixkit
from benchmarks.runner import Row, Run, arguments, failure, free_memory, wall_seconds
from benchmarks.shapes import SHAPES
from prefixkit.models.requirements import CACHE

RIVALS = ["stock", "expand", "batch", "session", "tree"]


def main() -> None:
    sizes = {"prompts": [2048], "new": 128, "samples": [64], "beams": [4]}
    options = arguments(__doc__, shape="Llama-3.1-8B", device="cuda", **sizes, turns=3, rivals=RIVALS)
    run = Run(options, options.device)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = SHAPES[options.shape].build(options.device, dtype)
    for length in options.prompts:
        for kind, count in [("samples", n) for n in options.samples] + [("beams", n) for n in options.beams]:
            row: Row = {"shape": options.shape, "prompt": length, "new": options.new, kind: count}
            for name in options.rivals:
                row |= {name: timed(name, model, kind, count, options, length)}
            run.add("calls", {key: value for key, value in row.items() if value is not None})
    run.finish()


def timed(name: str, model: Any, kind: str, count: int, options: Any, length: int) -> Row | None:
    """Seconds of a rival's calls, and GiB at their peak without the weights; None if it has no such call."""
    (prefixkit.patch if name in ("session", "tree") else prefixkit.unpatch)(model)
    try:
        if (call := contender(name, model, kind, count, options.new)) is None:
            return None

        def once() -> None:
            call(torch.randint(5, 30000, (1, length), device=model.device))

        before = held(model)
        times = wall_seconds(once, repeats=1 + options.turns, wait=lambda: wait(model))
        later = statistics.median(times[1:] or times)
        return {
            "first_s": round(times[0], 3),
            "s": round(later, 3),
            "peak_gib": round((held(model, most=True) - before) / 2**30, 2),
        }
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return {"failed": failure(error)}
    finally:
        prefixkit.unpatch(model)
        free_memory()


def contender(name: str, model: Any, kind: str, count: int, new: int) -> Callable[[torch.Tensor], Any] | None:
    """A rival's call for a prompt ``[1, length]``."""
    many = {"do_sample": True, "num_return_sequences": count} if kind == "samples" else {"num_beams": count}
    given = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, **many}

    def expanded(ids: torch.Tensor) -> Any:
        cache, rows = DynamicCache(config=model.config), ids.repeat(count, 1)
        with torch.no_grad():
            model(ids[:, :-1], **{CACHE: cache}, logits_to_keep=1)
        cache.batch_repeat_interleave(count)
        how = given | {"num_return_sequences": 1}
        return model.generate(rows, attention_mask=torch.ones_like(rows), **{CACHE: cache}, **how)

    def batched(ids: torch.Tensor) -> Any:
        how = GenerationConfig(max_new_tokens=new, do_sample=True, eos_token_id=-1)
        return model.generate_batch(ids.repeat(count, 1).tolist(), generation_config=how)

    if name == "session":
        session = prefixkit.Session(model, kv_budget="16GiB" if model.device.type == "cuda" else "2GiB")
        if kind == "samples":
            return lambda ids: session.generate(ids.tolist(), n=count, max_new_tokens=new, stop_token_ids=())
        return lambda ids: session.beam_search(ids.tolist(), num_beams=count, max_new_tokens=new, stop_token_ids=())
    if name in ("expand", "batch"):
        possible = kind == "samples" and (name == "expand" or model.device.type == "cuda")
        return (expanded if name == "expand" else batched) if possible else None
    return lambda ids: model.generate(ids, attention_mask=torch.ones_like(ids), **given)


def wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def held(model: Any, most: bool = False) -> int:
    """Bytes held now, at which the peak is reset; or the peak since the last reset."""
    if model.device.type == "cuda":
        if most:
            return torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not most:
        Path("/proc/self/clear_refs").write_text("5")  # Linux counts anew
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index("VmHWM:" if most else "VmRSS:") + 1])


if __name__ == "__main__":
    main()
