"""Attention with scores in memory, where torch's flash attention cannot compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefixkit.attention.variants import Variant
from prefixkit.backends.torch.program.attention_calls import Call, Places
from prefixkit.backends.torch.program.merge import pick
from prefixkit.backends.torch.read_keys import Keys, scratch
from prefixkit.backends.torch.tuning import Heads


class Own(NamedTuple):
    """A layer's own inputs for each query, ``selected`` and ``bias``: see :func:`expanded_attention`."""

    selected: Tensor | None = None
    bias: Tensor | None = None

    @property
    def scored(self) -> bool:
        """Whether these inputs need scores in memory."""
        return self.selected is not None or self.bias is not None


NOTHING = Own()
# Scores that a variant changes at once on a CPU: 512 KiB, so that its intermediate tensors stay in the second-level
# cache, and in memory that the allocator does not return to the system.
_CHANGED_AT_ONCE = 1 << 17


def _shown(call: Call, places: Places, selected: Tensor | None) -> Tensor | None:
    """The keys that a call's queries see: bool, broadcast to ``[batch, heads, rows, length]``; None for all."""
    if selected is None:
        return call.mask
    mine = pick(selected, call.row, call.batch * call.rows).view(call.batch, 1, call.rows, -1)
    chosen = mine.gather(3, places.kv.expand(-1, -1, call.rows, -1))
    return chosen if call.mask is None else chosen & call.mask


def _biases(call: Call, places: Places, bias: Tensor) -> Tensor:
    """``[batch, heads, rows, length]`` the biases that are added to a call's scores."""
    mine = pick(bias, call.row, call.batch * call.rows)
    mine = mine.view(call.batch, call.rows, *mine.shape[1:]).transpose(1, 2)
    return mine.gather(3, places.kv.expand(-1, *mine.shape[1:3], -1))


def _changed(score: Tensor, places: Places, variant: Variant, numbers: Tensor) -> Tensor:
    """Scores ``[batch, heads, rows, length]`` as the variant changes them; on a CPU some heads at a time, in place."""
    shape = score.shape
    heads = shape[1] if score.is_cuda else max(1, _CHANGED_AT_ONCE * shape[1] // max(1, score.numel()))
    if heads >= shape[1]:
        changed = variant.change(score, places.b, numbers, places.q, places.kv).to(torch.float32)
        return changed if changed.shape == shape else changed.expand(shape).clone()  # not a view of the products
    for part, h in zip(torch.split(score, heads, 1), torch.split(numbers, heads), strict=True):
        part.copy_(variant.change(part, places.b, h, places.q, places.kv))
    return score


def scored_attention(
    call: Call,
    places: Places,
    own: Own,
    variant: Variant,
    numbers: Tensor | None,
    q: Tensor,
    k: Keys,
    v: Tensor,
    heads: Heads,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention with scores in memory: out and lse ``[batch, heads, rows, ...]``, empty for rows that see no key."""
    batch, rows, gqa_group, kv_heads = call.batch, call.rows, heads.gqa_group, heads.kv_heads
    q = q.view(batch, rows, kv_heads, gqa_group, heads.head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, gqa_group * rows, heads.head_dim)
    *keys, v = (
        states.reshape(batch * kv_heads, call.length, states.shape[3])
        for states in (*(k if isinstance(k, tuple) else (k,)), v)
    )
    # Calls share the scratch: a call's scores are used up before the next call computes its own.
    space = None if q.is_cuda else scratch.matrix(2, batch * heads.heads * rows, call.length, torch.float32)
    score = _scores(q, keys, scale, space).view(batch, heads.heads, rows, call.length)
    if own.bias is not None:
        score += _biases(call, places, own.bias)
    if numbers is not None:
        score = _changed(score, places, variant, numbers)
    if (shown := _shown(call, places, own.selected)) is not None:
        score.masked_fill_(~shown, -torch.inf)
    # On a GPU normalising the weights saves no time, and gives larger errors once parts are merged.
    weight, total, lse = _weights(score, normalized=v.dtype == torch.float32 and not score.is_cuda)
    out = _product(weight.to(v.dtype).view(batch * kv_heads, gqa_group * rows, call.length), v)
    out = out.view(batch, heads.heads, rows, heads.value_dim)
    return (out if total is None else out / total), lse


def _weights(score: Tensor, *, normalized: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weights, the divisor of the outputs (None for 1), and the log-sum-exp; 0 and -inf for rows that see no key.

    Weights that are not ``normalized`` are 1 at the largest score, which rounding to 16 bits does not change.
    """
    top = score.amax(dim=-1)
    hidden = top == -torch.inf
    if not normalized:
        weight = score.sub_(top.masked_fill(hidden, 0.0)[..., None]).exp_()
        total = weight.sum(dim=-1)
        return weight, total.masked_fill(hidden, 1.0)[..., None], top + total.log()
    weight = torch.softmax(score, dim=-1, out=score)
    # The largest weight is 1 / sum(exp(score - largest score)).
    lse = top - weight.amax(dim=-1).log()
    if bool(hidden.any()):
        weight.masked_fill_(hidden[..., None], 0.0)
        lse.masked_fill_(hidden, -torch.inf)
    return weight, None, lse


def _scores(q: Tensor, keys: Sequence[Tensor], scale: float, space: Tensor | None) -> Tensor:
    """``[batch, rows, length]`` float32 ``scale * q k``, in ``space`` if it is given.

    The elements of a key are in several tensors, one after another.
    """
    first, *others = keys
    score = _product(q[..., : first.shape[2]], first.transpose(1, 2), scale, space)
    done = first.shape[2]
    for part in others:
        score += _product(q[..., done : done + part.shape[2]], part.transpose(1, 2), scale)
        done += part.shape[2]
    return score


def _product(a: Tensor, b: Tensor, scale: float = 1.0, space: Tensor | None = None) -> Tensor:
    """``scale * a @ b`` for batches of matrices, summed and returned in float32, in ``space`` if it is given."""
    if a.dtype != torch.float32 and a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32).mul_(scale)
    found = torch.bmm(a.float(), b.float(), out=None if space is None else space.view(*a.shape[:2], b.shape[2]))
    return found if scale == 1.0 else found.mul_(scale)  # a factor inside the product rounds differently
