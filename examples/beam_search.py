"""Beam search as forks of a tree: beams share their common tokens, and no KV is copied when they are reordered.

Run: python examples/beam_search.py          (SmolLM2-135M, downloaded on first use)
     python examples/beam_search.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import models

import prefixkit

PROMPTS = ["The capital of France is", "The three primary colours are"]


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    result = prefixkit.beam_search(model, tokenizer, PROMPTS, num_beams=4, num_return_sequences=4, max_new_tokens=16)
    for index, prompt in enumerate(PROMPTS):
        print(prompt)
        for beam in result.of_prompt(index):
            print(f"  {beam.score:8.4f}  {beam.text!r}")
    print(f"\n{result.report}")


if __name__ == "__main__":
    main()
