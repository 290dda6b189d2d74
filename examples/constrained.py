"""Samples of digits only, samples that a function ends, and beams, all in one batch over one tree.

Run: python examples/constrained.py          (SmolLM2-135M, downloaded on first use)
     python examples/constrained.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

from collections.abc import Callable

import models
import torch

import prefixkit
from prefixkit import BeamParams, Request, SamplingParams

PROMPT = "The year in which the war ended was"


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    texts = [tokenizer.decode([token]) for token in range(model.config.vocab_size)]
    digits = torch.tensor([text.strip().isdigit() for text in texts])

    def only_digits() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """A new processor for each sample, with the arguments and result of a logits processor of transformers."""
        return lambda ids, logits: logits.masked_fill(~digits, -torch.inf)

    tokens = tokenizer(PROMPT)["input_ids"]
    asked = [
        SamplingParams(n=4, max_new_tokens=4, logits_processors=only_digits),
        SamplingParams(n=4, max_new_tokens=30, stop=lambda tokens, text: text.count(" ") == 3),
        BeamParams(num_beams=4, num_return_sequences=2, max_new_tokens=8),
    ]
    with prefixkit.Session(model, tokenizer, kv_budget="64MiB") as session:
        result = session.run(Request(index, tokens, params) for index, params in enumerate(asked))
    for sample in result:
        print(f"{sample.prompt_index} {sample.index}  {sample.finish_reason:6}  {sample.text!r}")
    print(f"\n{result.report}")


if __name__ == "__main__":
    main()
