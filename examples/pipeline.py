"""A text-generation pipeline of transformers over a patched model: several answers to each of several prompts.

Run: python examples/pipeline.py          (SmolLM2-135M, downloaded on first use)
     python examples/pipeline.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import models
import torch
from transformers import pipeline

import prefixkit

QUESTIONS = ["What is a lighthouse?", "What is a harbour?"]
SHARED = "You answer questions about the sea in one sentence. Say when you do not know. Do not make anything up.\n"


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    answer = pipeline("text-generation", model=prefixkit.patch(model), tokenizer=tokenizer)
    torch.manual_seed(0)
    # Both prompts and all of their samples are one batch, in which the instructions are computed once.
    results = answer(
        [SHARED + question for question in QUESTIONS],
        batch_size=2,
        num_return_sequences=4,
        do_sample=True,
        max_new_tokens=24,
        return_full_text=False,
    )
    for question, samples in zip(QUESTIONS, results, strict=True):
        print(question)
        for one in samples:
            print("  ", repr(one["generated_text"]))


if __name__ == "__main__":
    main()
