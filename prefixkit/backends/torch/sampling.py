"""``sample`` by the specification, on the host; see the op for its contract."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prefixkit.ops.sampling_records import RECORD, STEP, params_of, tokens_of
from prefixkit.sampling.rng import uniforms
from prefixkit.sampling.specification import BrokenLogits, sample_tokens


def sample(logits: Tensor, records: Tensor, seen: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
    """``sample``."""
    table = records[: len(logits)].cpu().numpy().view(RECORD)[:, 0]
    rows = np.flatnonzero(table["active"])
    if not len(rows):
        return
    index = torch.from_numpy(rows).to(logits.device)
    own = logits if len(rows) == len(logits) else logits[index]
    found = _sample_rows(own.float(), table[rows], seen[index])
    sampled, tokens[index], logprobs[index] = found[0].numpy(), *(part.to(logits.device) for part in found)
    records[index, STEP] += 1
    whole = sampled >= 0
    word = torch.from_numpy(sampled[whole] >> 5).to(logits.device)
    bit = torch.from_numpy((np.uint32(1) << (sampled[whole] & 31).astype(np.uint32)).view(np.int32)).to(logits.device)
    place = index[torch.from_numpy(whole).to(logits.device)], word
    seen[place] = seen[place] | bit


def _sample_rows(logits: Tensor, table: np.ndarray, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities on the host; -1 and NaN for rows that cannot be sampled from."""
    params, numbers = params_of(table), uniforms(table["key"], table["step"])
    none = np.zeros(0, dtype=np.int64)
    penalised = table["penalty"] != 1
    masks = iter(seen[torch.from_numpy(penalised).to(seen.device)].cpu().numpy())
    histories = [tokens_of(next(masks)) if held else none for held in penalised]
    try:
        tokens, logprobs = sample_tokens(logits, params, numbers, histories)
        return tokens.cpu(), logprobs.cpu()
    except BrokenLogits:  # of some row
        pass
    tokens = torch.full((len(params),), -1, device="cpu")
    logprobs = torch.full((len(params),), torch.nan, dtype=torch.float32, device="cpu")
    for row in range(len(params)):
        one = slice(row, row + 1)
        try:
            tokens[one], logprobs[one] = sample_tokens(logits[one], params[one], numbers[one], histories[one])
        except BrokenLogits:
            continue
    return tokens, logprobs
