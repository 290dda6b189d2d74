"""Whole calls of a session on one GPU, random bf16 weights, against vLLM: seconds of a call as a user makes it.

    python -m benchmarks.whole_calls [--shapes Llama-3.1-8B,Llama-3.2-1B,gpt-oss-20b] [--only nothing] [--turns 3]
    python -m benchmarks.whole_calls --who vllm        if vLLM is installed; else recorded seconds are shown with ours

The calls are those of ``shapes.toml``: prompts of random tokens, others at each call, top-p 0.95.  The first call
captures graphs and compiles; its time is ``first_s``.  ``benchmarks/compare.py --cases whole`` times the same calls
in two checkouts in turns.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import prefixkit
from benchmarks.runner import Row, Run, arguments, clocks, free_memory
from benchmarks.shapes import CALLS, FAMILIES, SHAPES, Calls

Generate = Callable[[list[list[int]], Calls], int]  # takes prompts; returns how many tokens were sampled
WINDOWS = [name for name in CALLS if name.startswith("windows")]
DENSE = [name for name in CALLS if not name.startswith(("experts", "windows"))]
OF_SHAPE = {"Llama-3.1-8B": DENSE, "Llama-3.2-1B": DENSE, "gpt-oss-20b": ["experts, 8 x 32", *WINDOWS]}
OF_SHAPE |= dict.fromkeys(("gemma-2-9b", "gemma-3-12b"), WINDOWS)
RECORDED = json.loads((Path(__file__).parent / "anchors" / "h200_vllm.json").read_text())["seconds"]


def ours(model: Any, compiled: bool) -> Generate:
    """Calls of one session of a patched model."""
    session = prefixkit.Session(prefixkit.patch(model), compiled=compiled)

    def generate(prompts: list[list[int]], calls: Calls) -> int:
        fixed: Row = {"n": calls.samples, "max_new_tokens": calls.new, "stop_token_ids": (), "top_p": 0.95}
        return int(session.generate(prompts, **fixed).report.new_tokens)

    return generate


def vllm(model: Any) -> Generate:
    """Calls of vLLM, for a model of the same configuration with its own random weights."""
    from vllm import LLM, SamplingParams

    with TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        options: Row = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_seqs": 1024}
        engine = LLM(folder, max_model_len=32768, **options)

    def generate(prompts: list[list[int]], calls: Calls) -> int:
        fixed: Row = {"n": calls.samples, "max_tokens": calls.new, "ignore_eos": True, "detokenize": False}
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = engine.generate(asked, SamplingParams(**fixed, top_p=0.95), use_tqdm=False)
        return sum(len(sample.token_ids) for one in found for sample in one.outputs)

    return generate


def timed(generate: Generate, name: str, vocab: int, turns: int) -> Row:
    """Seconds of the first call, and of ``turns`` others."""
    calls, seconds = CALLS[name], list[float]()
    for turn in range(turns + 1):
        prompts = calls.random_prompts(turn, vocab)
        torch.cuda.synchronize()
        began = time.perf_counter()
        sampled = generate(prompts, calls)
        seconds.append(time.perf_counter() - began)
        assert sampled == calls.sampled, (sampled, calls)
    first, *later = [round(one, 4) for one in seconds]
    median = statistics.median(later)
    row: Row = {"call": name, "first_s": first, "s": median, "each_s": later}
    return row | {"tokens/s": round(calls.sampled / median), "sm_mhz": clocks().get("sm_mhz")}


def main() -> None:
    who: Row = {"choices": ("prefixkit", "vllm"), "default": "prefixkit"}
    options = arguments(__doc__, shapes=list(OF_SHAPE), who=who, only="", turns=3, eager=False)
    run = Run(options)
    for name in options.shapes:
        shape = SHAPES.get(name) or FAMILIES[name]
        if options.who == "vllm":
            generate = vllm(shape.build("meta", torch.bfloat16))
        else:
            generate = ours(shape.build("cuda", torch.bfloat16), compiled=not options.eager)
        for call in OF_SHAPE[name]:
            if options.only in call:
                row = {"who": options.who, "shape": name, **timed(generate, call, shape.vocab, options.turns)}
                if recorded := RECORDED.get(name, {}).get(call):
                    row |= {"recorded_vllm_s": statistics.median(recorded)}
                run.add("calls", row)
        del generate
        free_memory()
    run.finish()


if __name__ == "__main__":
    main()
