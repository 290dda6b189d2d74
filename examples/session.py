"""Rollouts in a session: pool, CUDA graphs and compiled layers stay, so later calls take only their prompts and steps.

Run: python examples/session.py          (SmolLM2-135M, downloaded on first use)
     python examples/session.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import time

import models

import prefixkit

BATCHES = [["Name a colour.", "Name a fruit."], ["Name a city.", "Name a river."], ["Name a metal.", "Name a bird."]]


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    params = prefixkit.SamplingParams(n=8, temperature=1.0, max_new_tokens=16)
    with prefixkit.Session(model, tokenizer, kv_budget="256MiB") as session:
        for number, batch in enumerate(BATCHES):
            began = time.perf_counter()
            result = session.generate(batch, params, seed=number)
            print(f"call {number}: {len(result)} samples in {time.perf_counter() - began:.2f} s")
        for sample in session.stream(BATCHES[0], params):  # samples as they finish; none is kept
            print(f"{sample.prompt_index} {sample.index}  {sample.text!r}")
    print(f"\n{result.report}")


if __name__ == "__main__":
    main()
