"""Beam search of transformers, unchanged, on a prefix tree: no KV is copied when beams are reordered.

Run: python examples/beams_unchanged.py          (SmolLM2-135M, downloaded on first use)
     python examples/beams_unchanged.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import time

import models
import torch

import prefixkit

PROMPT = "The history of the lighthouse begins with fires on hills, long before there were towers. " * 4


def search(model, inputs):
    """A script that does not use prefixkit."""
    return model.generate(
        **inputs, num_beams=8, num_return_sequences=4, do_sample=False, max_new_tokens=24, return_dict_in_generate=True
    )


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    began = time.perf_counter()
    before = search(model, inputs)
    between = time.perf_counter()
    after = search(prefixkit.patch(model), inputs)
    ended = time.perf_counter()
    length = inputs["input_ids"].shape[1]
    for text in tokenizer.batch_decode(after.sequences[:, length:], skip_special_tokens=True):
        print(repr(text))
    cache = after.past_key_values
    print(f"\nthe same tokens: {torch.equal(before.sequences, after.sequences)}")
    print(f"KV of {cache.kv_tokens} tokens in place of {cache.batch_size * cache.get_seq_length()}")
    print(f"{between - began:.1f} s before the patch, {ended - between:.1f} s after")


if __name__ == "__main__":
    main()
