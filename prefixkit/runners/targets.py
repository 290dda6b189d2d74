"""The log-probabilities of wanted tokens under a step's logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.gpu.staging import upload

_ELEMENTS_AT_ONCE = 2**19  # 2 MiB of float32: on a CPU the softmax of a few rows stays in the cache


def score_targets(logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens, and whether greedy decoding takes them.

    Args:
        logits: ``[n, vocab]`` float32.
        rows, tokens: ``[S]`` the row of the logits for each token, in any order, and the token.

    Returns:
        ``[S]`` float32 and bool, on the logits' device.
    """
    if logits.device.type != "cpu":
        at, ids = upload([rows, tokens], logits.device)
        return torch.log_softmax(logits.float(), -1)[at, ids], logits.argmax(-1)[at] == ids
    logprobs, greedy = torch.empty(len(rows), dtype=torch.float32), torch.empty(len(rows), dtype=torch.bool)
    at_once = max(1, min(_ELEMENTS_AT_ONCE // max(logits.shape[1], 1), len(logits)))
    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], np.arange(0, len(logits) + at_once, at_once)).tolist()
    space = logits.new_empty((at_once, logits.shape[1]))
    for begin, first, last in zip(range(0, len(logits), at_once), bounds, bounds[1:], strict=False):
        some, mine = logits[begin : begin + at_once].float(), order[first:last]
        own, wanted = rows[mine] - begin, tokens[mine]  # numpy's argmax takes a quarter of the time of torch's
        logprobs.numpy()[mine] = torch.log_softmax(some, -1, out=space[: len(some)]).numpy()[own, wanted]
        greedy.numpy()[mine] = some.numpy().argmax(1)[own] == wanted
    return logprobs, greedy
