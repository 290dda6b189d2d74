"""The probability with which tokens were sampled, by torch on any device; the sampling kernel does not compute it.

The arithmetic is that of ``sampling.specification``, bit by bit.  The host does not wait for the device, so a CUDA
graph can capture this.  Sorting the vocabulary takes longer than the sampling itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkit.ops.sampling_records import RECORD
from prefixkit.sampling.weights import EXP2, FLOOR, LOG2E, TOP

ELEMENTS_AT_ONCE = 2**22  # scores that are sorted at once; each takes 32 bytes, intermediate tensors included


def write_drawn(
    logits: Tensor,
    records: Tensor,
    seen: Tensor,
    tokens: Tensor,
    drawn: Tensor,
    allowed: Tensor | None = None,
    elements: int = ELEMENTS_AT_ONCE,
) -> None:
    """Write the probabilities with which tokens were sampled; see the op ``sample`` for the tensors.

    Args:
        logits, records: As for the op.
        seen: As for the op, before the tokens were sampled.
        tokens: The sampled tokens.
        drawn: Written in active rows.
        allowed: As for the op.
        elements: The most scores that are sorted at once, in whole rows.
    """
    at_once = max(1, elements // logits.shape[1])
    for begin in range(0, len(logits), at_once):
        rows = slice(begin, min(begin + at_once, len(logits)))
        may = None if allowed is None else allowed[rows]
        found = _drawn(logits[rows].float(), records[rows], seen[rows], tokens[rows], may)
        active = _field(records[rows], "active")[:, None] != 0
        drawn[rows] = torch.where(active, found, drawn[rows])


def _drawn(logits: Tensor, records: Tensor, seen: Tensor, tokens: Tensor, allowed: Tensor | None) -> Tensor:
    """``[n, 2]`` the logarithm of the token's probability, and the mass that the filters left, for ``n`` rows."""
    temperature = _field(records, "temperature")[:, None]
    scores = _penalised(logits, seen, _field(records, "penalty")[:, None])
    if allowed is not None:
        free = _field(records, "masked")[:, None] == 0
        scores = torch.where(free | _bits(allowed, logits.shape[1]), scores, -torch.inf)
    ordered = scores.sort(1, descending=True).values
    rate = (torch.full_like(temperature, float(LOG2E)) / temperature).clamp(min=torch.finfo(torch.float32).tiny)
    weights = _weigh(ordered, ordered[:, :1], rate)  # descending too, because they rise with the scores
    total = weights.sum(1, dtype=torch.int64)
    left = _left(ordered, weights, records)
    own = _weigh(scores.gather(1, tokens.clamp(min=0)[:, None]), ordered[:, :1], rate)[:, 0]
    greedy = temperature[:, 0] == 0
    share, mass = (own.double() / left).log(), left.double() / total
    found = torch.stack((torch.where(greedy, 0, share), torch.where(greedy, 1, mass)), dim=1)
    return torch.where(tokens[:, None] < 0, torch.nan, found.float())


def _penalised(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    held = _bits(seen, logits.shape[1]) & (penalty != 1)
    return torch.where(held, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _bits(words: Tensor, vocab: int) -> Tensor:
    """``[n, vocab]`` bool, from the bits of ``[n, words]`` int32."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).flatten(1)[:, :vocab] != 0


def _weigh(scores: Tensor, top: Tensor, rate: Tensor) -> Tensor:
    """``weights.weigh``: integers in float32."""
    power = ((scores - top) * rate).clamp(min=FLOOR)
    whole = power.floor()
    power = power - whole
    weights = power * (TOP * float(EXP2[0]))
    for factor in EXP2[1:-1]:
        weights = (weights + TOP * float(factor)) * power
    weights = weights + TOP * float(EXP2[-1])
    scale = ((whole.to(torch.int32) + 127) << 23).view(torch.float32)  # 2**whole
    return (weights * scale).floor()


def _left(scores: Tensor, weights: Tensor, records: Tensor) -> Tensor:
    """``[n]`` int64: the sum of the weights of the tokens that the filters leave; scores and weights descend."""
    vocab = scores.shape[1]
    top_k, top_p, min_p = (_field(records, name) for name in ("top_k", "top_p", "min_p"))
    off = (top_k <= 0) | (top_k >= vocab)
    least = scores.gather(1, (top_k.long() - 1).clamp(0, vocab - 1)[:, None])
    weights = weights * (off[:, None] | (scores >= least))
    sums = weights.cumsum(1, dtype=torch.int64)
    total = sums[:, -1]
    need = torch.minimum((top_p * total).ceil().clamp(min=1).to(torch.int64), total)
    nucleus = torch.where(top_p < 1, 1 + (sums < need[:, None]).sum(1), vocab)
    exact = (min_p * TOP).ceil()
    floor = exact.float()
    floor = torch.where(floor.double() < exact, floor.nextafter(torch.full_like(floor, torch.inf)), floor)
    likely = (weights >= floor[:, None]).sum(1)
    last = torch.minimum(nucleus, likely).clamp(min=1) - 1  # 0 if weights are NaN, as in greedy rows
    return sums.gather(1, last[:, None])[:, 0]


def _field(records: Tensor, name: str) -> Tensor:
    dtype, offset = RECORD.fields[name][:2]  # type: ignore[index]  # it has fields
    held = records[:, offset // 4 : (offset + dtype.itemsize) // 4].contiguous()
    return held.view({"f4": torch.float32, "f8": torch.float64, "i4": torch.int32}[dtype.str[1:]])[:, 0]
