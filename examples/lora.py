"""LoRA adapters on a patched model: samples with the adapter, with another, and without any. Needs ``peft``.

Run: python examples/lora.py          (SmolLM2-135M, downloaded on first use)
     python examples/lora.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import models
import torch
from peft import LoraConfig, get_peft_model

import prefixkit

PROMPT = "Write one sentence about a lighthouse."


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config, adapter_name="first").eval()
    adapted.add_adapter("second", config)
    inputs = tokenizer(PROMPT, return_tensors="pt")

    def show(what: str) -> None:
        torch.manual_seed(1)
        out = adapted.generate(
            **inputs, do_sample=True, num_return_sequences=8, max_new_tokens=16, return_dict_in_generate=True
        )
        cache, length = out.past_key_values, inputs["input_ids"].shape[1]
        print(f"{what}: KV of {cache.kv_tokens} tokens in place of {cache.batch_size * cache.get_seq_length()}")
        for text in tokenizer.batch_decode(out.sequences[:2, length:], skip_special_tokens=True):
            print("  ", repr(text))

    show("first adapter")
    adapted.set_adapter("second")
    show("second adapter")
    with adapted.disable_adapter():
        show("no adapter")


if __name__ == "__main__":
    main()
