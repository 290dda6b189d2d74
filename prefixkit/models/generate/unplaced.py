"""Padded rows of a model that gets no ``position_ids`` and so counts positions itself.

Most models then count padding as text: the position of a row's first token is the row's padding.  With rotary embedding
attention depends on distances alone, so its result is the same if a tree counts each row from its first token.  This is
measured; if transformers is to continue the rows, keys are computed again at the positions that the model counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from prefixkit.models.attention_class import argument_names, forward_below
from prefixkit.models.families import known_positions
from prefixkit.models.model_calls import logits_of
from prefixkit.models.states.taken_cache import cache_keyword, empty_cache, has_attention
from prefixkit.models.tensor_parallel import is_sharded, tp_size
from prefixkit.models.variants.layer_variants import trial
from prefixkit.tree.arrays import Ints, Longs
from prefixkit.tree.rows import Rows

_TEXT, _PADDING, _ATTEMPTS = 5, 59, 3
_RESERVED = 16  # positions that a model may use up before its first token


def example_of(tokens: Ints, pad: Longs) -> Tensor:
    """``[6]`` int64: a token used as padding, and the first tokens of the row with the most padding."""
    row = int(pad.argmax())
    return torch.from_numpy(np.append(tokens[row, 0], np.resize(tokens[row, pad[row] :], _TEXT))).long()


def ignores_padding(model: PreTrainedModel, example: Tensor, reach: int) -> bool:
    """Whether a padded row without ``position_ids`` gets the same logits as the row at positions from zero.

    It does if the model does not count padding, or if it counts padding but depends on distances alone.  Logits are
    compared up to rounding: the product of rotated keys and queries rounds differently at other positions.

    Args:
        model: A model in evaluation mode, or without random parts.
        example: See :func:`example_of`; on the model's device.
        reach: Positions that rows may reach, at most :func:`known_positions`.
    """
    pad = min(_PADDING, reach - _TEXT, known_positions(model) - _TEXT - _RESERVED)
    if is_sharded(model) or tp_size(model) > 1 or pad < 1:  # one process's forward pass would wait for the others
        return False
    try:
        with trial(model) as storing:
            if "position_ids" not in argument_names(model):
                return _unmoved(model, example, pad)
            own, counted = _states(model, example, pad, None), _states(model, example, 0, 0)
            if any(module.rope_deltas is not None for module in storing):
                return False  # the model stores positions of a pass for the next
            return _equal(own, counted) or (
                _equal(own, _states(model, example, 0, pad))
                and all(_same_at(model, example, counted[0], first) for first in (pad, reach - _TEXT))
            )
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False


def keeps_padding_out(model: PreTrainedModel, example: Tensor) -> bool:
    """Whether a row after masked padding, at positions from zero, gets the same logits as without padding.

    Some layers that keep a state let padding change the state.  Under tensor parallelism this is not measured, and the
    result is False.
    """
    if tp_size(model) > 1:
        return False
    if not has_attention(model):
        return _unmoved(model, example, _PADDING)
    with trial(model):
        return _close(*(_states(model, example, pad, -pad)[0] for pad in (0, _PADDING)))


def compute_again(model: PreTrainedModel, rows: Rows, cache: Cache, device: torch.device, *, placed: bool) -> None:
    """Compute rows again into an empty cache of transformers.  Positions count each row's text from zero if the rows
    are ``placed`` so and the model accepts positions; else the model counts them.
    """
    own = np.arange(rows.length) - rows.pad[:, None]
    tokens, mask = torch.from_numpy(rows.tokens()).long().to(device), torch.from_numpy(own >= 0).long().to(device)
    placed = placed and "position_ids" in argument_names(model)
    at = torch.from_numpy(own).clamp(min=0).to(device) if placed else None
    _call(model, tokens, mask, at, cache, keep=1)


def _states(model: PreTrainedModel, example: Tensor, pad: int, first: int | None, count: int = _TEXT) -> list[Tensor]:
    """Logits ``[count, vocab]`` and each layer's keys for the example's text, whose last token runs in a pass of its
    own; positions start at ``first``, or the model counts them (None).
    """
    device, cache, length = example.device, empty_cache(model), pad + count
    tokens = torch.cat((example[:1].expand(pad), example[1 : 1 + count]))[None]
    mask, at, logits = (torch.arange(length, device=device)[None] >= pad).long(), None, list[Tensor]()
    for begin, end in ((0, length - 1), (length - 1, length)):
        if begin < end:
            at = None if first is None else (first + torch.arange(begin, end, device=device)[None]).clamp(min=0)
            logits.append(_call(model, tokens[:, begin:end], mask[:, :end], at, cache))
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return [
        torch.cat(logits)[-count:],
        *(key[:, :, -count:] for key in keys if isinstance(key, Tensor) and key.ndim == 4),
    ]


@torch.no_grad()
def _call(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor | None, at: Tensor | None, cache: Cache, keep: int = 0
) -> Tensor:
    if not has_attention(model) and mask is not None and mask.shape[1] > tokens.shape[1]:
        mask = None  # as in generate(): such a model accepts a mask of new tokens alone
    given: dict[str, Any] = {
        "input_ids": tokens,
        "attention_mask": mask,
        cache_keyword(model): cache,
        "use_cache": True,
    }
    if at is not None:
        given["position_ids"] = at
    if keep and "logits_to_keep" in argument_names(model):
        given["logits_to_keep"] = keep
    logits = logits_of(forward_below(model)(**given))
    assert logits is not None, "of a causal language model"
    return logits[0]


def _same_at(model: PreTrainedModel, example: Tensor, counted: Tensor, first: int) -> bool:
    """Whether a text gets the same logits at positions from ``first`` on.  A single token, at distance 0 from itself,
    must get the same bits, which excludes position embeddings that are added to tokens.
    """
    alone = (torch.equal(*(_states(model, example, 0, at, 1)[0] for at in (0, first))) for _ in range(_ATTEMPTS))
    return any(alone) and _close(_states(model, example, 0, first)[0], counted)


def _unmoved(model: PreTrainedModel, example: Tensor, pad: int) -> bool:
    """Whether a model without an argument for positions returns the same logits for a text after padding, and for a
    single token the same bits.  Models without attention have no positions, and padding changes the rounding of their
    scans, so their bits are not compared.
    """
    if not has_attention(model):
        return _close(*(_states(model, example, of, None)[0] for of in (0, pad)))
    alone = (torch.equal(*(_states(model, example, of, None, 1)[0] for of in (0, pad))) for _ in range(_ATTEMPTS))
    return any(alone) and _close(*(_states(model, example, of, None)[0] for of in (0, pad)))


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(_close, some, others))


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether logits or keys are equal up to a rounding far smaller than the effect of other positions."""
    if one.shape != other.shape:
        return False
    shown = one.abs() < 1e30  # some models set the logits of hidden tokens to the least number
    eps, one, other = torch.finfo(one.dtype).eps, one.float().where(shown, 0), other.float().where(shown, 0)
    return bool((one - other).abs().max() <= eps**0.5 * (one - one.mean(-1, keepdim=True)).abs().max())
