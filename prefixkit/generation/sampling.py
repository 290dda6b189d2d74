"""Drawing the next token: penalty, temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution.

Each row is drawn from its own logits, parameters and uniform number alone, so a row's token and log-probability are the
same bits whatever else is in the batch.

The vocabulary is never sorted.  Top-p ranks only the tokens that may belong to the nucleus: tokens below (1 - p) / V
together hold less than 1 - p, so they lie outside it.

Ties.  Top-k keeps every token as likely as the k-th, so it can keep more than k.  Top-p keeps the fewest tokens that
hold p, and of equally likely ones at its border those with the higher ids.  So do transformers' processors, but that
theirs leave to the sort which of the equally likely ones stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.generation.request import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.integer[Any]]
Positions = NDArray[np.intp]

_ELEMENTS_AT_ONCE = 2**19  # 2 MiB of float32: softmax, penalty and selection of a few rows stay in the cache
_BLOCK = 256  # tokens per block of the two-level cumulative sum
_SHRINK = 1 - 1e-6  # bounds give way by more than float32 rounds, so that rounding never excludes a token


def draw(
    logits: Tensor,
    params: SamplingParams | Sequence[SamplingParams],
    uniforms: NDArray[np.float64],
    histories: Sequence[Ids] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token for every row.

    Args:
        logits: ``[rows, vocab]`` float32, read only.  ``-inf`` masks a token.
        params: One for all rows, or one for each.
        uniforms: ``[rows]`` float64 in [0, 1), one for each row (``rng.uniforms``); greedy rows ignore theirs.
        histories: For each row the tokens its sequence holds, prompt included, in any order and as often as they occur;
            only the repetition penalty needs them.

    Returns:
        tokens: ``[rows]`` int64.
        logprobs: ``[rows]`` float32, the log-softmax of the untouched logits at the token.

    Raises:
        TypeError: the logits are not float32.
        ValueError: shapes disagree, a row holds NaN, +inf or no finite logit, or a penalised row has no history.
    """
    each, seen = _check(logits, params, uniforms, histories)
    rows, vocab = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    at_once = max(1, _ELEMENTS_AT_ONCE // vocab)
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        raw = torch.log_softmax(logits[part].detach(), dim=-1)
        _check_finite(raw, logits, begin)
        scores, weights = _scores_and_weights(logits[part].detach(), each[part], seen[part])
        for row, law in enumerate(each[part]):
            weight = None if weights is None else weights[row]
            tokens[begin + row] = _draw_row(scores[row], weight, law, float(uniforms[begin + row]))
        logprobs[part] = raw.gather(1, tokens[part, None].to(raw.device))[:, 0]
    return tokens.to(logits.device), logprobs.to(logits.device)


def probabilities(
    logits: Tensor, params: SamplingParams | Sequence[SamplingParams], histories: Sequence[Ids] | None = None
) -> Tensor:
    """The distribution that :func:`draw` draws from: ``[rows, vocab]`` float64, each row summing to 1."""
    each, seen = _check(logits, params, np.zeros(len(logits)), histories)
    result = torch.zeros(logits.shape, dtype=torch.float64)
    for row, law in enumerate(each):
        one = logits[row : row + 1].detach()
        _check_finite(torch.log_softmax(one, dim=-1), logits, row)
        scores, weights = _scores_and_weights(one, [law], seen[row : row + 1])
        if weights is None:
            result[row, int(np.argmax(scores[0]))] = 1
        else:
            kept = kept_tokens(scores[0], weights[0], law)
            kept = np.arange(len(weights[0])) if kept is None else kept
            held = weights[0][kept].astype(np.float64)
            result[row, torch.from_numpy(kept)] = torch.from_numpy(held / held.sum())
    return result


def kept_tokens(scores: Floats, weights: Floats, params: SamplingParams) -> Positions | None:
    """The tokens that top-k, top-p and min-p leave, in ascending order; None for the whole vocabulary.

    Args:
        scores: ``[vocab]`` penalised logits over temperature.
        weights: ``[vocab]`` their softmax.
        params: The filters.
    """
    kept: Positions | None = None
    if 0 < params.top_k < len(scores):
        kept = np.flatnonzero(scores >= _kth_largest(scores, params.top_k))
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p) if kept is None else kept[_nucleus(weights[kept], params.top_p)]
    if params.min_p > 0:
        # The likeliest token is never dropped by the filters before, so its weight is the same before and after them.
        floor = np.float32(params.min_p) * weights.max()
        kept = np.flatnonzero(weights >= floor) if kept is None else kept[weights[kept] >= floor]
    return kept


def _check(
    logits: Tensor,
    params: SamplingParams | Sequence[SamplingParams],
    uniforms: NDArray[np.float64],
    histories: Sequence[Ids] | None,
) -> tuple[list[SamplingParams], Sequence[Ids | None]]:
    """Parameters and history of each row, or an error that says which argument does not fit."""
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}; convert them with .float()")
    if logits.ndim != 2 or (logits.shape[0] and not logits.shape[1]):
        raise ValueError(f"logits must have shape [rows, vocab], got {list(logits.shape)}")
    rows = len(logits)
    each = [params] * rows if isinstance(params, SamplingParams) else list(params)
    for name, size in (("params", len(each)), ("uniforms", len(uniforms))):
        if size != rows:
            raise ValueError(f"{name} must have one entry for each of the {rows} rows of logits, got {size}")
    if histories is None:
        penalised = [row for row, law in enumerate(each) if law.repetition_penalty != 1]
        if penalised:
            raise ValueError(
                f"row {penalised[0]} asks for repetition_penalty={each[penalised[0]].repetition_penalty}, "
                "which needs the tokens of its sequence; pass histories, or use repetition_penalty=1.0"
            )
        return each, [None] * rows
    if len(histories) != rows:
        raise ValueError(f"histories must have one entry for each of the {rows} rows of logits, got {len(histories)}")
    return each, histories


def _check_finite(log_softmax: Tensor, logits: Tensor, first_row: int) -> None:
    """Name the first row that cannot be drawn from."""
    # A single NaN or +inf, or nothing but -inf, turns every entry of a row's log-softmax into NaN: one column tells.
    broken = torch.isnan(log_softmax[:, 0])
    if bool(broken.any()):
        row = first_row + int(broken.nonzero()[0])
        values = logits[row]
        what = "NaN" if values.isnan().any() else "+inf" if values.isposinf().any() else "no finite value"
        raise ValueError(
            f"row {row} of the logits holds {what}, so no token can be drawn; look at what the model computed"
        )


def _scores_and_weights(
    logits: Tensor, laws: Sequence[SamplingParams], histories: Sequence[Ids | None]
) -> tuple[Floats, Floats | None]:
    """Penalised logits over temperature and softmax, ``[rows, vocab]`` each; no softmax if every row is greedy."""
    scores = logits
    if any(law.repetition_penalty != 1 for law in laws):
        scores = logits.cpu().clone()
        for row, law in enumerate(laws):
            history = histories[row]
            if law.repetition_penalty != 1 and history is not None:
                _penalise(scores[row].numpy(), history, law.repetition_penalty)
    if all(law.greedy for law in laws):
        return scores.cpu().numpy(), None
    temperatures = [1.0 if law.greedy else law.temperature for law in laws]
    if any(temperature != 1 for temperature in temperatures):
        scores = scores / torch.tensor(temperatures, device=scores.device)[:, None]
    weights = torch.softmax(scores, dim=-1).cpu()
    if bool(weights[:, 0].isnan().any()):
        raise ValueError(
            "logits over temperature, or under the repetition penalty, leave float32; use values nearer to 1"
        )
    return scores.cpu().numpy(), weights.numpy()


def _penalise(scores: Floats, history: Ids, penalty: float) -> None:
    """Make the tokens of a sequence less likely, in place and each once, however often they occur."""
    ids = np.asarray(history, dtype=np.int64)
    ids = ids[ids < len(scores)]  # an embedding can be larger than the head: its last tokens are never drawn
    old, factor = scores[ids], np.float32(penalty)
    scores[ids] = np.where(old < 0, old * factor, old / factor)


def _draw_row(scores: Floats, weights: Floats | None, params: SamplingParams, uniform: float) -> int:
    if params.greedy or weights is None:
        return int(np.argmax(scores))  # the first of equals
    kept = kept_tokens(scores, weights, params)
    return _invert(weights, uniform) if kept is None else int(kept[_invert(weights[kept], uniform)])


def _invert(weights: Floats, uniform: float) -> int:
    """The first position whose cumulative weight exceeds ``uniform`` times the whole; its weight is never 0.

    Two levels, blocks and then tokens, so that only one block is summed token by token.  Boundaries add up in float64.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    block, before = _locate(blocks, uniform * float(blocks[-1]))
    begin = int(starts[block])
    inside = np.cumsum(weights[begin : begin + _BLOCK], dtype=np.float64)
    position, _ = _locate(inside, uniform * float(blocks[-1]) - before)
    return begin + position


def _locate(cumulative: NDArray[np.float64], target: float) -> tuple[int, float]:
    """The first entry above ``target``, and the entry before it (or 0)."""
    # Rounding can lift a target onto the whole sum, above which there is nothing: stay just below.
    below = min(target, float(np.nextafter(cumulative[-1], 0.0)))
    found = int(np.searchsorted(cumulative, below, side="right"))
    return found, float(cumulative[found - 1]) if found else 0.0


def _kth_largest(scores: Floats, k: int) -> np.float32:
    """The k-th largest score."""
    # It is at least the k-th largest of the maxima of disjoint groups, so only the scores above that one need ranking.
    groups = max(1024, 4 * k)
    depth = len(scores) // groups
    if depth > 1:
        maxima = scores[: depth * groups].reshape(depth, groups).max(axis=0)
        scores = scores[scores >= np.partition(maxima, groups - k)[groups - k]]
    return np.float32(np.partition(scores, len(scores) - k)[len(scores) - k])


def _nucleus(weights: Floats, top_p: float) -> Positions:
    """Ascending positions of the fewest largest weights that hold ``top_p`` of the sum."""
    total = float(weights.sum(dtype=np.float64))
    likely = np.flatnonzero(weights >= np.float32((1 - top_p) * total / len(weights) * _SHRINK))
    held = weights[likely]
    # Positive floats are ordered as their bits are, so a histogram over the upper bits ranks everything but one bin.
    bins = held.view(np.int32) >> 18  # 32 bins an octave
    bins -= bins.min()
    above = np.cumsum(np.bincount(bins, weights=held)[::-1])  # mass of each bin and of all higher ones, from the top
    depth = min(int(np.searchsorted(above, top_p * total)), len(above) - 1)
    missing = top_p * total - (float(above[depth - 1]) if depth else 0.0)
    ranked = np.sort(held[bins == len(above) - 1 - depth])[::-1]
    count = min(len(ranked), 1 + int(np.searchsorted(np.cumsum(ranked, dtype=np.float64), missing)))
    border = ranked[count - 1]
    kept = likely[held >= border]
    surplus = int(np.count_nonzero(ranked >= border)) - count  # tokens as likely as the last that is needed
    return np.delete(kept, np.flatnonzero(weights[kept] == border)[:surplus]) if surplus else kept
