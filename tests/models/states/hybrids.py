"""Tiny random models whose layers keep states, and what judges their samples."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import prefixkit
from prefixkit import SamplingParams, Session
from prefixkit.models.attention_class import forward_below
from prefixkit.models.states.taken_cache import cache_keyword

VOCAB = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_HALF = ["linear_attention", "full_attention"]
# Of each kind of state one model: gated delta nets, Mamba 2, short convolutions, Mamba 1 beside attention and alone.
# Nemotron-H's time steps are clamped to time_step_min in prompts and not in single tokens: 1e-9 makes both equal.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA
    | {"num_hidden_layers": 4, "layer_types": _HALF * 2, "num_experts": 4, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16}
    | {"time_step_min": 1e-9},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
    | {"mamba_dt_rank": 8, "num_experts": 2, "num_experts_per_tok": 2, "use_mamba_kernels": False},
    "mamba": {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 8},
}
# Mamba 2 alone, for tests of few kinds.
_OTHERS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    }
}


def make_hybrid(model_type: str, head_dim: int = 16, **changes: Any) -> PreTrainedModel:
    """A float32 model in eval mode, of weights that are large enough for states to matter."""
    own = (HYBRIDS | _OTHERS)[model_type]
    config = AutoConfig.for_model(model_type, **{**_SIZES, "head_dim": head_dim, **own, **changes})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "norm" not in name and "A_log" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def by_pass(model: Any, tokens: Sequence[int], prompt: int) -> torch.Tensor:
    """Log-probabilities of the tokens after a prompt by one pass of the unpatched model, without a cache."""
    ids = torch.tensor([list(tokens)], device=model.device)
    with torch.no_grad():
        logits = forward_below(model)(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0]


def by_step(model: Any, tokens: Sequence[int], prompt: int, at_once: int = 1) -> torch.Tensor:
    """The same by a pass for each token but the first ones, which run ``at_once``."""
    ids, cache, steps = torch.tensor([list(tokens)], device=model.device), DynamicCache(config=model.config), []
    with torch.no_grad():
        for begin, end in pairwise([0, *range(at_once, ids.shape[1])]):
            given = {cache_keyword(model): cache, "use_cache": True}
            steps.append(forward_below(model)(input_ids=ids[:, begin:end], **given).logits[0, -1])
    logits = torch.stack(steps)[prompt - at_once :]
    return logits.float().log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0]


def assert_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], samples: Iterable[Any], exact: Any = None, allowed: float = 1e-4
) -> None:
    """Each token of each sample has the log-probability that one forward pass over the whole text gives it; or all err
    by at most 1.5 times what the unpatched model's own passes do.  ``exact``: the same model in float32, which judges.
    """
    texts = [([*prompts[one.prompt_index], *one.tokens], len(prompts[one.prompt_index]), one) for one in samples]
    right = [by_pass(model if exact is None else exact, text, prompt) for text, prompt, _ in texts]
    given = [torch.tensor(sample.logprobs, device=of.device) for of, (*_, sample) in zip(right, texts, strict=True)]
    ours = torch.cat([(each - of).abs() for each, of in zip(given, right, strict=True)])
    if ours.max() <= allowed:
        return  # whatever the model's own passes do
    theirs = list[torch.Tensor]()
    for of, (text, prompt, _) in zip(right, texts, strict=True):
        steps = (by_step(model, text, prompt, 1 if exact is None else prompt) - of).abs()
        theirs.append(steps if exact is None else torch.maximum((by_pass(model, text, prompt) - of).abs(), steps))
    own = torch.cat(theirs)
    assert ours.mean() <= allowed + 1.5 * own.mean(), (float(ours.mean()), float(own.mean()))
    if exact is None:
        assert ours.max() <= allowed + 1.5 * own.max(), (float(ours.max()), float(own.max()))


def padded(seed: int, length: int = 24, pads: tuple[int, ...] = (0, 4, 7)) -> dict[str, torch.Tensor]:
    """Rows behind padding, which share the head of their text."""
    ids = torch.randint(3, VOCAB, (len(pads), length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
        ids[row, pad : pad + 12] = ids[0, :12]
    return {"input_ids": ids, "attention_mask": mask}


def assert_samples(model: Any, seed: int) -> None:
    """Samples of a session have the log-probabilities of one forward pass: of prompts that part anywhere, in steps of
    few tokens, and in calls that go on from samples.
    """
    rng, model = random.Random(seed), prefixkit.patch(model)
    base = [rng.randrange(3, VOCAB) for _ in range(18)]
    with Session(model, prefill_chunk=rng.choice([None, 7]), page_size=rng.choice([4, 16])) as session:
        prompts = [base[:part] + [rng.randrange(3, VOCAB) for _ in range(own)] for part, own in ((18, 1), (11, 6))]
        for turn in range(2):
            found = session.generate(prompts, SamplingParams(n=2, max_new_tokens=5, seed=turn, stop_token_ids=()))
            assert_logprobs(model, prompts, [*found][turn::3])
            prompts = [*([*prompts[one.prompt_index], *one.tokens, 7] for one in [*found][:2]), base[:3]]
        assert session.report.prompt_tokens_found > 0
