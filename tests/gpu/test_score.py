"""Scores on the GPU: they err no more than the unpatched model's log-probabilities, with and without KV of before."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import prefixkit
from tests.gpu.test_model import model_of, prompts


def logprobs(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1)[range(len(tokens)), tokens].double().cpu()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 200])
def test_scores_err_no_more_than_the_unpatched_models(head_dim: int, dtype: torch.dtype, chunk: int | None) -> None:
    """The second and third call find KV of every token, and run those again whose logits are wanted."""
    model = model_of(head_dim, dtype)
    exact = copy.deepcopy(model).double()
    given = prompts(9)
    continuations = [prompt[690:720] for prompt in given] + [[*given[0][690:700], 1, 2, 3]]
    pairs = [(prompt, tokens) for prompt in given for tokens in continuations]
    truth = torch.cat([logprobs(exact, *pair) for pair in pairs])
    stock = torch.cat([logprobs(model, *pair) for pair in pairs])
    with prefixkit.patched(model), prefixkit.Session(model, kv_budget="64MiB", prefill_chunk=chunk) as session:
        for _ in range(3):
            scores = session.score(given, continuations)
            ours = torch.from_numpy(np.concatenate([one.logprobs for each in scores for one in each])).double()
            assert (ours - truth).norm() <= 1.5 * (stock - truth).norm()
