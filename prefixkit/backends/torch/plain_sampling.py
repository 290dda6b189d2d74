"""``sample`` by the specification, on the host; see the op for its contract."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.ops.sampling_records import RECORD, params_of, tokens_of
from prefixkit.sampling.rng import uniforms
from prefixkit.sampling.specification import BrokenLogits, Ids, NothingAllowed, sample_tokens


def sample(
    logits: Tensor,
    records: Tensor,
    seen: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    drawn: Tensor | None = None,
    allowed: Tensor | None = None,
) -> None:
    """``sample``."""
    written = (records, seen, tokens, logprobs) if drawn is None else (records, seen, tokens, logprobs, drawn)
    state = [part[: len(logits)] for part in written]
    on_host = [part.cpu() for part in state]  # no copies if they are on the CPU
    bits = None if allowed is None else allowed[: len(logits)].cpu().numpy()
    _sample(logits, bits, *(part.numpy() for part in on_host))
    for part, changed in zip(state, on_host, strict=True):
        if changed.device != part.device:
            part.copy_(changed)


def _sample(
    logits: Tensor,
    allowed: NDArray[np.int32] | None,
    records: NDArray[np.int32],
    seen: NDArray[np.int32],
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    drawn: NDArray[np.float32] | None = None,
) -> None:
    """``sample`` on arrays, in place."""
    table = records.view(RECORD)[:, 0]
    rows = np.flatnonzero(table["active"])
    if not len(rows):
        return
    every = len(rows) == len(logits)
    active = logits if every else logits[torch.from_numpy(rows).to(logits.device)]
    how = None if drawn is None else np.full((len(rows), 2), np.nan, np.float32)
    may: list[Ids | None] = [None] * len(rows)
    if allowed is not None:
        for place in np.flatnonzero(table["masked"][rows]).tolist():
            may[place] = tokens_of(allowed[rows[place]])
    sampled, sampled_logprobs = _sample_rows(active, table[rows], seen if every else seen[rows], how, may)
    tokens[rows], logprobs[rows] = sampled, sampled_logprobs
    if drawn is not None:
        drawn[rows] = how
    table["step"][rows] += 1
    whole = sampled >= 0
    word = rows[whole], sampled[whole] >> 5
    seen[word] |= (np.uint32(1) << (sampled[whole] & 31).astype(np.uint32)).view(np.int32)


def _sample_rows(
    logits: Tensor,
    table: np.ndarray,
    seen: NDArray[np.int32],
    drawn: NDArray[np.float32] | None,
    allowed: list[Ids | None],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens and log-probabilities of the rows.

    A row that cannot be sampled from gets -1 and NaN, or -1 and -inf if no token is allowed, and NaN in ``drawn``.
    """
    greedy = not table["temperature"].any()  # greedy rows, such as those of beams, read no random numbers
    params, numbers = params_of(table), np.zeros(len(table)) if greedy else uniforms(table["key"], table["step"])
    histories = [np.zeros(0, dtype=np.int64)] * len(params)
    for row in np.flatnonzero(table["penalty"] != 1).tolist():
        histories[row] = tokens_of(seen[row])
    try:
        tokens, logprobs = sample_tokens(logits, params, numbers, histories, drawn, allowed)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()
    except BrokenLogits:  # in some row
        pass
    all_tokens, all_logprobs = np.full(len(params), -1), np.full(len(params), np.nan, np.float32)
    if drawn is not None:
        drawn[:] = np.nan  # some rows may be written already
    for row in range(len(params)):
        one = slice(row, row + 1)
        own = None if drawn is None else drawn[one]
        try:
            tokens, logprobs = sample_tokens(logits[one], params[one], numbers[one], histories[one], own, allowed[one])
            all_tokens[row], all_logprobs[row] = int(tokens), float(logprobs)
        except NothingAllowed:
            all_logprobs[row] = -np.inf
        except BrokenLogits:
            continue
    return all_tokens, all_logprobs
