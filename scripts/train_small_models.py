"""Train the two models of tests/data/small_models, a hybrid and one with latent attention, on the standard library.

    python scripts/train_small_models.py [--out tests/data/small_models] [--model hybrid]

The models read bytes, of the Python sources of the interpreter that runs this; every twentieth file is held out.  Seeds
are fixed; another machine rounds differently, and so gets other weights, with about the same loss.  A model takes some
nine minutes of one core.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CONTEXT, ROWS = 384, 8
STEPS, RATE = 1000, 4e-3
_SIZES: dict[str, Any] = {
    "vocab_size": 260,  # as prefixkit.testing.tiny.ByteTokenizer's: bytes, the end of a text, padding
    "eos_token_id": 256,
    "pad_token_id": 257,
    "bos_token_id": None,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
# Head sizes are some that prefixkit's kernels take; the proportions are those of the large models.
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "latent": {
        "model_type": "deepseek_v3",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    },
}


def modules() -> tuple[Tensor, Tensor]:
    """The bytes of the standard library's modules, those to train on and those held out."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [
        b"".join(one.read_bytes() for at, one in enumerate(paths) if (at % 20 == 7) == held) for held in (False, True)
    ]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def crops(text: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """``[rows, CONTEXT + 1]`` bytes, from anywhere."""
    firsts = torch.randint(len(text) - CONTEXT - 1, (rows, 1), generator=generator)
    return text[firsts + torch.arange(CONTEXT + 1)].long()


def loss_of(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Nats a byte."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def entropy(text: Tensor) -> float:
    """The entropy of single bytes, in nats: the loss of a model without context."""
    shares = torch.bincount(text.long()) / len(text)
    return float(-(shares * shares.clamp(min=1e-12).log()).sum())


def train(model: PreTrainedModel, text: Tensor) -> None:
    """AdamW; the learning rate rises for the first twentieth of the steps and then falls to 0."""
    generator = torch.Generator().manual_seed(1)
    decayed = [one for one in model.parameters() if one.ndim >= 2]
    others = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))
    began, warmup = time.monotonic(), STEPS // 20
    for step in range(STEPS):
        fallen = max(0, step - warmup) / (STEPS - warmup)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * fallen))
        loss = loss_of(model, crops(text, ROWS, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step}: {float(loss):.3f} nats a byte, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="both, if none is named")
    parser.add_argument("--out", type=Path, default=Path("tests/data/small_models"))
    given = parser.parse_args()
    text, held_out = modules()
    rows = crops(held_out, 32, torch.Generator().manual_seed(2))
    print(f"{len(text) / 1e6:.1f} MB to train on; {entropy(held_out):.3f} nats a byte without context")
    for name in given.model or MODELS:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**_SIZES, **MODELS[name])
        model = AutoModelForCausalLM.from_config(config).float().train()
        print(f"{name}: {sum(one.numel() for one in model.parameters()):,} parameters")
        train(model, text)
        model = model.eval().bfloat16()
        model.save_pretrained(given.out / name)
        with torch.no_grad():
            print(f"{name}: {float(loss_of(model.float(), rows)):.3f} nats a byte of modules held out")


if __name__ == "__main__":
    main()
