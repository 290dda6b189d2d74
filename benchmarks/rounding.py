"""How many samples rounding changes in float32: by prefill chunk, KV budget and the other prompts, on one CPU thread.

    OMP_NUM_THREADS=1 python -m benchmarks.rounding --out benchmarks/results/cpu_rounding.json

SmolLM2-135M-Instruct continues heads of HumanEval problems. A sample differs if one of its tokens differs.
"""

from typing import Any

import torch

import prefixkit
from benchmarks.runner import Run, arguments
from prefixkit.evaluation.demo.model import load_demo
from prefixkit.evaluation.tasks.source import Source, load

FILTERS: dict[str, dict[str, float]] = {"none": {}, "top_p": {"top_p": 0.95}, "min_p": {"min_p": 0.05}}
FILTERS["top_k"] = {"top_k": 50}
CALLS: dict[str, dict[str, Any]] = {"chunk": {"prefill_chunk": 64}, "budget": {"kv_budget": "96MiB"}}


def main() -> None:
    sizes = {"prompts": 10, "samples": 40, "new": 32, "seed": 1}
    options = arguments(__doc__, filters=list(FILTERS), **sizes)
    run = Run(options, "cpu")
    torch.set_num_threads(1)
    model, tokenizer = load_demo()
    model = prefixkit.patch(model)
    prompts = [tokenizer(problem.head)["input_ids"] for problem in load(Source(task="humaneval"))[: options.prompts]]

    def sampled(given: list[list[int]], filters: dict[str, float], **call: Any) -> list[list[int]]:
        ends = {"max_new_tokens": options.new, "stop_token_ids": (), "seed": options.seed}
        result = prefixkit.generate(model, tokenizer, given, n=options.samples, **ends, **filters, **call)
        return [sample.tokens for sample in result]

    for name in options.filters:
        own = FILTERS[name]
        together = sampled(prompts, own)
        others = {call: sampled(prompts, own, **how) for call, how in CALLS.items()}
        others["alone"] = [tokens for prompt in prompts for tokens in sampled([prompt], own)]
        differ = {
            call: sum(one != other for one, other in zip(together, tokens, strict=True))
            for call, tokens in others.items()
        }
        run.add("rows", {"filter": name, "of": len(together), "differ": differ})
    run.finish()


if __name__ == "__main__":
    main()
