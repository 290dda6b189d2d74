"""Try tiny random models of families, split over two processes, against the same models in one process.

    torchrun --nproc-per-node 2 scripts/split_families.py llama qwen3_moe deepseek_v3

Prints for each whether samples and beams are equal, the difference of log-probabilities, and bytes of KV of a token.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import FIRST_WORD, tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

import prefixkit

HEAD = [*range(FIRST_WORD, FIRST_WORD + 18)]
PROMPTS = [[*HEAD, 118, 119], [*HEAD, 150, 151, 152]]
CONTINUATIONS = [[[130, 131], [132]], [[133, 134, 135]]]


def results(model: Any) -> tuple[Any, np.ndarray, int]:
    """Tokens of samples and beams; log-probabilities of continuations; bytes of KV of a token."""
    with prefixkit.Session(prefixkit.patch(model), kv_budget="4MiB") as session:
        scores = session.score(PROMPTS, CONTINUATIONS)
        samples = session.generate(PROMPTS, n=2, max_new_tokens=6, seed=3)
        beams = session.beam_search(PROMPTS, num_beams=3, max_new_tokens=5)
        size = session.store.pool.spec.bytes_per_token
    tokens = [[one.tokens for one in found] for found in (samples, beams)]
    return tokens, np.concatenate([one.logprobs for each in scores for one in each]), size


def compare(name: str, folder: Path) -> str:
    torch.manual_seed(0)
    whole = tiny_model(tiny_config(name), "").float().eval()
    if torch.distributed.get_rank() == 0:
        whole.save_pretrained(folder)
    torch.distributed.barrier()
    tokens, logprobs, size = results(whole)
    config = DistributedConfig(tp_plan="auto")
    try:
        split = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).eval()
        of_split = results(split)
    except (ValueError, TypeError) as error:  # transformers has no plan, or prefixkit refuses it
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    apart = float(abs(of_split[1] - logprobs).max())
    return f"tokens equal: {of_split[0] == tokens}, apart by {apart:.1e}, KV of {size} and {of_split[2]} bytes a token"


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    made = [Path(tempfile.mkdtemp()) if os.environ["RANK"] == "0" else None]
    torch.distributed.broadcast_object_list(made)
    for name in sys.argv[1:]:
        said = compare(name, made[0] / name)
        if os.environ["RANK"] == "0":
            print(f"{name}: {said}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
