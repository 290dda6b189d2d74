"""Whole calls of models whose layers mostly keep states, random bf16 weights, against transformers: seconds of a call.

    python -m benchmarks.hybrids [--shapes Qwen3-Next-80B-A3B] [--samples 64] [--prompt 2048] [--new 128] [--turns 3]
    python -m benchmarks.hybrids --only cold,known --turns 14

One prompt of random tokens, another at each call, top-p 0.95.  *tree*: a session's call; *prefill once + expand*: one
forward pass over the prompt, its cache repeated for each sample, and a loop of forward passes and torch's sampling;
*stock*: ``model.generate(num_return_sequences=...)``, which runs the prompt for each sample.  *known*: a session's call
with a few-shot prompt of 4,096 tokens that the session knows and 16 new ones; *cold*: one that it does not know.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

import prefixkit
from benchmarks.runner import Row, Run, arguments, clocks, free_memory
from benchmarks.shapes import HYBRIDS
from prefixkit.models.requirements import CACHE

Call = Callable[[list[int], int, int], object]  # prompt, samples, new tokens
FEW_SHOT, OWN = 4096, 16


def stock(model: Any) -> Call:
    """transformers' ``generate``."""

    def call(prompt: list[int], samples: int, new: int) -> object:
        ids = torch.tensor([prompt], device=model.device)
        fixed: Row = {"do_sample": True, "top_p": 0.95, "top_k": 0, "min_new_tokens": new, "max_new_tokens": new}
        return model.generate(ids, attention_mask=torch.ones_like(ids), num_return_sequences=samples, **fixed)

    return call


def top_p(logits: Tensor, most: float = 0.95) -> Tensor:
    """``[rows, 1]`` tokens sampled from ``[rows, vocab]`` logits."""
    likely, order = logits.float().softmax(-1).sort(-1, descending=True)
    likely = likely.masked_fill(likely.cumsum(-1) - likely > most, 0)
    return order.gather(1, torch.multinomial(likely, 1))


def expand(model: Any) -> Call:
    """Compute the prompt once, then repeat its cache for each sample."""

    @torch.inference_mode()
    def call(prompt: list[int], samples: int, new: int) -> object:
        ids, cache = torch.tensor([prompt], device=model.device), DynamicCache(config=model.config)
        logits = model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
        cache.reorder_cache(torch.zeros(samples, dtype=torch.int64, device=model.device))
        tokens = [top_p(logits.expand(samples, -1))]
        for at in range(new - 1):
            positions = torch.full((samples, 1), len(prompt) + at, device=model.device)
            given: Row = {"input_ids": tokens[-1], CACHE: cache, "use_cache": True}
            tokens.append(top_p(model(**given, position_ids=positions).logits[:, -1]))
        return torch.cat(tokens, 1).cpu()

    return call


def on_tree(session: prefixkit.Session) -> Call:
    def call(prompt: list[int], samples: int, new: int) -> object:
        return session.generate([prompt], n=samples, max_new_tokens=new, stop_token_ids=(), top_p=0.95)

    return call


def timed(call: Call, prompts: list[list[int]], samples: int, new: int) -> Row:
    """Seconds of the first call, and of the others."""
    seconds = list[float]()
    for prompt in prompts:
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(prompt, samples, new)
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - began, 4))
    first, *later = seconds
    return {"first_s": first, "s": statistics.median(later), "each_s": later, "sm_mhz": clocks().get("sm_mhz")}


def main() -> None:
    only = ["stock", "expand", "tree", "cold", "known"]
    options = arguments(__doc__, shapes=list(HYBRIDS), only=only, samples=64, prompt=2048, new=128, turns=3)
    run, rng = Run(options), np.random.default_rng(0)
    for name in options.shapes:
        shape = HYBRIDS[name]
        model = shape.build("cuda", torch.bfloat16)

        def prompts(tokens: int, count: int = options.turns + 1, vocab: int = shape.vocab) -> list[list[int]]:
            return rng.integers(10, vocab, (count, tokens)).tolist()

        size = options.samples, options.new
        for who, call, turns in (("stock", stock(model), 2), ("expand", expand(model), options.turns + 1)):
            if who not in options.only:
                continue
            try:
                row = timed(call, prompts(options.prompt)[:turns], *size)
            except torch.OutOfMemoryError as error:  # Nemotron-H: torch's scan holds a tensor of 1 TiB for 64 prompts.
                row = {"out_of_memory": str(error).split(".")[1].strip()}
            run.add("calls", {"shape": name, "who": who, **row})
            free_memory()
        with prefixkit.Session(prefixkit.patch(model)) as session:
            call = on_tree(session)
            if "tree" in options.only:
                row = {"shape": name, "who": "tree", **timed(call, prompts(options.prompt), *size)}
                report, pool = session.report, session.store.pool
                row |= {"kv_bytes_peak": report.kv_bytes_held_peak, "graph_steps": report.graph_steps}
                row |= {"state_bytes": pool.states.bytes, "bytes_per_state": pool.spec.bytes_per_state}
                run.add("calls", row)
            (head,) = prompts(FEW_SHOT, 1)
            asked = {"cold": prompts(FEW_SHOT + OWN)}
            asked["known"] = [head + own for own in prompts(OWN, options.turns + 2)]
            for who in asked:
                if who in options.only:
                    run.add("calls", {"shape": name, "who": who, **timed(call, asked[who], 1, 1)})
        prefixkit.unpatch(model)
        del model, session, call
        free_memory()
    run.finish()


if __name__ == "__main__":
    main()
