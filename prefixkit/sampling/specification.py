"""Sampling the next token: penalty, temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution.

Each row is sampled from its own logits, parameters and uniform number alone.  A row's token therefore does not depend
on the other rows of the batch, and is the same on a CPU (here) and on a GPU (``csrc/sampling``).  The following rules
specify both, bit by bit.  The vocabulary is never sorted.

1. **Scores.**  Logits in float32; bfloat16 and float16 logits are converted exactly.  If the penalty is not 1, each
   token that the sequence holds gets ``score < 0 ? score * penalty : score / penalty``, rounded once, with the penalty
   in float32.  Then tokens that a grammar does not allow get score -inf.  Greedy rows take the first of the largest
   scores.
2. **Weights.**  With ``top`` the largest score and ``rate = max(float32(log2(e)) / float32(temperature), 2**-126)``::

       power  = max((score - top) * rate, -64)      each operation rounded to float32, as all below
       n, f   = floor(power), power - floor(power)
       g      = ((((c5 f + c4) f + c3) f + c2) f + c1) f + 1       products and sums rounded separately, not fused
       weight = floor(g * 2**(39 + n))              exactly: a whole number from 0 to 2**39

   with c1 to c5 in ``weights.EXP2``.  Weights are integers, so their sums are exact in any order.  A token less likely
   than 2**-39 times the likeliest has weight 0; the other weights differ from ``exp((score - top) / temperature) *
   2**39`` by a relative error of at most ``(3.3 ln(top weight / weight) + 3) * 2**-24``, and then by at most one unit.
3. **Filters.**  Top-k keeps the tokens whose score is at least the k-th largest.  Of these, top-p keeps the fewest
   largest weights whose sum is at least ``max(1, min(ceil(top_p * float64(total)), total))``, with the product rounded
   to float64; of equal weights at the border it keeps those with the higher ids.  Min-p keeps weights of at least
   ``ceil(min_p * 2**39)``.
4. **Sample.**  The uniform is ``u / 2**53`` with an integer ``u`` (``rng``).  The token is the first, by id, at which
   the cumulative sum of kept weights exceeds ``floor(u * total / 2**53)``, in 128-bit integers.

The log-probability is the log-softmax of the untouched logits; on two devices it is equal up to some units in the last
place.  The same holds for the probability with which the token was sampled, which is its weight over the sum of the
kept weights (1 in greedy rows), and for the mass that the filters left, which is that sum over the sum of all weights.

Top-p ranks only the tokens that may belong to the nucleus: tokens less likely than (1 - p) / V together have less than
1 - p, so they are outside it.  Top-k keeps every token as likely as the k-th, so it can keep more than k tokens.  The
processors of transformers follow the same rules, except that their sort decides which of equally likely tokens top-p
keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.weights import Floats, Scratch, block_sums, invert, least, rate, share, weigh

Ids = NDArray[np.integer[Any]]
Positions = NDArray[np.intp]

GREEDY = SamplingParams(temperature=0)  # of beams: the likeliest token's log-probability gives those of the others
_ELEMENTS_AT_ONCE = 2**19  # 2 MiB of float32: the softmax of a few rows stays in the cache
_FLOATS = torch.float32, torch.bfloat16, torch.float16
_scratch = Scratch()  # at most six times _ELEMENTS_AT_ONCE, or a few times one row
_SPARE = 0.01  # margin of an exponent of 2: larger than its rounding errors, down to 2**-64
_SHRINK = 1 - 1e-6  # lowers bounds by more than the rounding of float32, which then never excludes a token


class BrokenLogits(ValueError):
    """No token can be sampled: a row holds NaN, +inf or no finite value, or its scores leave float32."""


class NothingAllowed(BrokenLogits):
    """No token can be sampled: no allowed token has a finite score."""


def sample_tokens(
    logits: Tensor,
    params: SamplingParams | Sequence[SamplingParams],
    uniforms: NDArray[np.float64],
    histories: Sequence[Ids] | None = None,
    drawn: Floats | None = None,
    allowed: Sequence[Ids | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token for every row.

    Args:
        logits: ``[rows, vocab]`` float32, bfloat16 or float16, read only.  ``-inf`` masks a token.
        params: One set of parameters for all rows, or one for each.
        uniforms: ``[rows]`` float64 in [0, 1), one for each row (``rng.uniforms``); greedy rows ignore theirs.
        histories: For each row the tokens its sequence holds, prompt included, in any order and as often as they occur;
            only the repetition penalty needs them.
        drawn: ``[rows, 2]`` float32, written: the logarithm of the probability with which the token was sampled, and
            the mass that the filters left.
        allowed: For each row the tokens that a grammar allows, in any order; None: all.

    Returns:
        tokens: ``[rows]`` int64.
        logprobs: ``[rows]`` float32, the log-softmax of the untouched logits at the token.

    Raises:
        TypeError: the logits have another dtype.
        ValueError: shapes disagree, or a penalised row has no history.
        BrokenLogits: a row holds NaN, +inf or no finite logit, or its scores leave float32.
        NothingAllowed: no allowed token of a row has a finite score.
    """
    each, seen = _check(logits, params, uniforms, histories)
    may = [None] * len(each) if allowed is None else allowed
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device="cpu")
    logprobs = torch.empty(rows, dtype=torch.float32, device="cpu")
    at_once = max(1, min(_ELEMENTS_AT_ONCE // max(vocab, 1), rows))
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        some = _float32(logits[part].detach().cpu())
        raw = torch.log_softmax(some, dim=-1, out=torch.from_numpy(_scratch.rows("log_softmax", *some.shape)))
        _check_finite(raw, logits, begin)
        scores = _scores(some.numpy(), each[part], seen[part], may[part])
        own = None if drawn is None else drawn[part]
        tokens[part] = torch.tensor(_sample_rows(scores, each[part], uniforms[part], own), device="cpu")
        logprobs[part] = raw.gather(1, tokens[part, None])[:, 0]
    return tokens.to(logits.device), logprobs.to(logits.device)


def _float32(logits: Tensor) -> Tensor:
    if logits.dtype == torch.float32:
        return logits
    return torch.from_numpy(_scratch.rows("logits", *logits.shape)).copy_(logits)


def kept_tokens(scores: Floats, weights: Floats, params: SamplingParams, total: int | None = None) -> Positions | None:
    """The tokens that top-k, top-p and min-p leave, in ascending order; None for the whole vocabulary.

    ``scores [vocab]`` are penalised logits, ``weights [vocab]`` the result of :func:`weigh` for them, and ``total`` the
    sum of the weights, if known.
    """
    kept: Positions | None = None
    if 0 < params.top_k < len(scores):
        kept = np.flatnonzero(scores >= _kth_largest(scores, params.top_k))
    if params.top_p < 1:
        if kept is None:
            kept = _nucleus(weights, params.top_p, _total(weights) if total is None else total)
        else:
            kept = kept[_nucleus(weights[kept], params.top_p, _total(weights[kept]))]
    if params.min_p > 0:
        floor = least(params.min_p)
        kept = np.flatnonzero(weights >= floor) if kept is None else kept[weights[kept] >= floor]
    return kept


def _total(weights: Floats) -> int:
    return int(block_sums(weights[None])[0, -1])


def _check(
    logits: Tensor,
    params: SamplingParams | Sequence[SamplingParams],
    uniforms: NDArray[np.float64],
    histories: Sequence[Ids] | None,
) -> tuple[list[SamplingParams], Sequence[Ids | None]]:
    """Parameters and history of each row; raises an error that says which argument does not fit."""
    if logits.dtype not in _FLOATS:
        raise TypeError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}; convert them with .float()")
    if logits.ndim != 2 or (logits.shape[0] and not logits.shape[1]):
        raise ValueError(f"logits must have shape [rows, vocab], got {list(logits.shape)}")
    rows = len(logits)
    each = [params] * rows if isinstance(params, SamplingParams) else list(params)
    given = rows if histories is None else len(histories)
    for name, size in (("params", len(each)), ("uniforms", len(uniforms)), ("histories", given)):
        if size != rows:
            raise ValueError(f"{name} must have one entry for each of the {rows} rows of logits, got {size}")
    if histories is None:
        penalised = [row for row, own in enumerate(each) if own.repetition_penalty != 1]
        if penalised:
            raise ValueError(
                f"row {penalised[0]} asks for repetition_penalty={each[penalised[0]].repetition_penalty}, "
                "which needs the tokens of its sequence; pass histories, or use repetition_penalty=1.0"
            )
    return each, [None] * rows if histories is None else histories


def _check_finite(log_softmax: Tensor, logits: Tensor, first_row: int) -> None:
    """Raise an error that names the first row from which no token can be sampled."""
    # A single NaN or +inf, or only -inf, makes every entry of a row's log-softmax NaN, so one column is enough.
    broken = torch.isnan(log_softmax[:, 0])
    if bool(broken.any()):
        row = first_row + int(broken.nonzero()[0])
        values = logits[row]
        what = "NaN" if values.isnan().any() else "+inf" if values.isposinf().any() else "no finite value"
        raise BrokenLogits(
            f"row {row} of the logits holds {what}, so no token can be sampled; look at what the model computed"
        )


def _scores(
    logits: Floats,
    params: Sequence[SamplingParams],
    histories: Sequence[Ids | None],
    allowed: Sequence[Ids | None],
) -> Floats:
    """Penalised logits of allowed tokens, or unchanged rows without copying; raises if no token can be sampled."""
    scores = logits
    with np.errstate(all="ignore"):
        if any(own.repetition_penalty != 1 or may is not None for own, may in zip(params, allowed, strict=True)):
            scores = logits.copy()
            for row, own, history, may in zip(scores, params, histories, allowed, strict=True):
                if own.repetition_penalty != 1 and history is not None:
                    _penalise(row, history, own.repetition_penalty)
                if may is not None:
                    _forbid_others(row, may)
        divided = scores.max(1) / np.array([1 if own.greedy else own.temperature for own in params], dtype=np.float32)
    if any(may is not None and top == -np.inf for may, top in zip(allowed, divided, strict=True)):
        raise NothingAllowed("no token that is allowed has a finite score")
    if not np.isfinite(divided).all():
        raise BrokenLogits(
            "logits over temperature, or under the repetition penalty, leave float32; use values nearer to 1"
        )
    return scores


def _penalise(scores: Floats, history: Ids, penalty: float) -> None:
    """Make the tokens of a sequence less likely, in place, each token once even if it occurs more often."""
    ids = np.asarray(history, dtype=np.int64)
    ids = ids[ids < len(scores)]  # an embedding may have more tokens than the head: the head never samples these
    old, factor = scores[ids], np.float32(penalty)
    scores[ids] = np.where(old < 0, old * factor, old / factor)


def _forbid_others(scores: Floats, allowed: Ids) -> None:
    """Make all tokens but these impossible, in place."""
    ids = np.asarray(allowed, dtype=np.int64)
    ids = ids[ids < len(scores)]
    held = scores[ids]
    scores.fill(-np.inf)
    scores[ids] = held


def _sample_rows(
    scores: Floats,
    params: Sequence[SamplingParams],
    uniforms: NDArray[np.float64],
    drawn: Floats | None,
) -> list[int]:
    tokens, whole = [0] * len(params), []
    for row, own in enumerate(params):
        if own.greedy:
            tokens[row] = int(np.argmax(scores[row]))  # the first of equals
            if drawn is not None:
                drawn[row] = 0, 1
        elif drawn is None and (some := _candidates(scores[row], own)) is not None:
            # The candidates include the likeliest token, so their weights are the same as among all tokens.
            (held,) = weigh(scores[row, some][None], [own.temperature])
            tokens[row] = int(some[_sample_weighed(scores[row, some], held, None, own, float(uniforms[row]))[0]])
        else:
            whole.append(row)
    if whole:
        some_scores = scores if len(whole) == len(params) else scores[whole]
        weights = weigh(some_scores, [params[row].temperature for row in whole], _scratch)
        sums = block_sums(weights, _scratch)
        for row, score, weight, blocks in zip(whole, some_scores, weights, sums, strict=True):
            tokens[row], left = _sample_weighed(score, weight, blocks, params[row], float(uniforms[row]))
            if drawn is not None:
                drawn[row] = math.log(float(weight[tokens[row]]) / left), left / int(blocks[-1])
    return tokens


def _sample_weighed(
    scores: Floats, weights: Floats, blocks: NDArray[np.int64] | None, params: SamplingParams, uniform: float
) -> tuple[int, int]:
    """The index of the sampled token among these, and the sum of the weights that the filters leave.

    ``blocks`` are the block sums of the weights, if known.
    """
    kept = kept_tokens(scores, weights, params, None if blocks is None else int(blocks[-1]))
    if kept is None:
        blocks = block_sums(weights[None])[0] if blocks is None else blocks
        return invert(weights, blocks, uniform), int(blocks[-1])
    held = weights[kept]
    (blocks,) = block_sums(held[None])
    return int(kept[invert(held, blocks, uniform)]), int(blocks[-1])


def _candidates(scores: Floats, params: SamplingParams) -> Positions | None:
    """The tokens, ascending, that top-k, or min-p on its own, can keep; None if every token must be weighed."""
    if 0 < params.top_k < len(scores):
        return np.flatnonzero(scores >= _kth_largest(scores, params.top_k))
    if params.min_p > 0 and params.top_p == 1:
        lowest = float(scores.max()) + (math.log2(params.min_p) - _SPARE) / float(rate(params.temperature))
        with np.errstate(over="ignore"):
            return np.flatnonzero(scores >= np.float32(lowest))
    return None


def _kth_largest(scores: Floats, k: int) -> np.float32:
    """The k-th largest score."""
    # It is at least the k-th largest of the maxima of disjoint groups, so only scores above that bound need ranking.
    groups = max(1024, 4 * k)
    depth = len(scores) // groups
    if depth > 1:
        maxima = scores[: depth * groups].reshape(depth, groups).max(axis=0)
        scores = scores[scores >= np.partition(maxima, groups - k)[groups - k]]
    return np.float32(np.partition(scores, len(scores) - k)[len(scores) - k])


def _nucleus(weights: Floats, top_p: float, total: int) -> Positions:
    """Ascending positions of the fewest largest weights whose sum is at least ``top_p`` of the total."""
    need = share(total, top_p)
    # At least 1, because a token of weight 0 is never sampled.
    likely = np.flatnonzero(weights >= np.float32(max((total - need) // len(weights) * _SHRINK, 1)))
    held = weights[likely]
    # Positive floats have the order of their bits, so a histogram over the upper bits ranks all but those of one bin.
    bins = held.view(np.int32) >> 18  # 32 bins per octave
    bins -= bins.min()
    # Weights of one bin are multiples of one power of 2, so float64 adds them exactly; sums over bins need 64 bits.
    above = np.cumsum(np.bincount(bins, weights=held)[::-1].astype(np.int64))
    depth = min(int(np.searchsorted(above, need)), len(above) - 1)
    missing = need - (int(above[depth - 1]) if depth else 0)
    ranked = np.sort(held[bins == len(above) - 1 - depth])[::-1]
    count = min(len(ranked), 1 + int(np.searchsorted(np.cumsum(ranked, dtype=np.float64).astype(np.int64), missing)))
    border = ranked[count - 1]
    kept = likely[held >= border]
    surplus = int(np.count_nonzero(ranked >= border)) - count  # tokens of the border's weight that are not needed
    return np.delete(kept, np.flatnonzero(weights[kept] == border)[:surplus]) if surplus else kept


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """How the rows of a batch are sampled.

    Attributes:
        params: ``[rows]`` the parameters of each row.
        keys: ``[rows]`` uint64 from ``rng.sample_key``.
        steps: ``[rows]`` number of tokens that each row has sampled, from 0 to 2**31 - 1.
        histories: For each row the tokens that its sequence holds, prompt included; read only with a repetition
            penalty.
    """

    params: Sequence[SamplingParams]
    keys: NDArray[np.uint64]
    steps: Ids
    histories: Sequence[Ids]
