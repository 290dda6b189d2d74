"""One line in a script that samples with transformers: the same calls of ``model.generate()``, on a prefix tree.

Run: python examples/patch_generate.py          (SmolLM2-135M, downloaded on first use)
     python examples/patch_generate.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import time

import models
import torch

import prefixkit

PROMPT = "Question: A train leaves at nine and takes four hours. When does it arrive? Think step by step.\nAnswer:"


def sample(model, tokenizer, prompt: str):
    """A script that does not use prefixkit."""
    inputs = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(0)
    return model.generate(
        **inputs,
        do_sample=True,
        temperature=0.8,
        num_return_sequences=16,
        max_new_tokens=24,
        return_dict_in_generate=True,
    )


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prompt = 6 * PROMPT  # as long as a few-shot prompt
    began = time.perf_counter()
    before = sample(model, tokenizer, prompt)
    between = time.perf_counter()
    prefixkit.patch(model)
    after = sample(model, tokenizer, prompt)
    ended = time.perf_counter()
    length = tokenizer(prompt, return_tensors="pt")["input_ids"].shape[1]
    for text in tokenizer.batch_decode(after.sequences[:4, length:], skip_special_tokens=True):
        print(repr(text))
    cache = after.past_key_values
    print(f"\nthe same tokens: {torch.equal(before.sequences, after.sequences)}")
    print(f"KV of {cache.kv_tokens} tokens in place of {cache.batch_size * cache.get_seq_length()}")
    print(f"{between - began:.1f} s before the patch, {ended - between:.1f} s after")


if __name__ == "__main__":
    main()
