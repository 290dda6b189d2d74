"""What a model says under a variant of attention in one whole pass over a text, without the patch and without a tree:
transformers runs it with an attention function that applies the variant to all scores at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from prefixkit.attention.variants import Variant
from prefixkit.attention.variants.transforms import Transforms

NAME = "prefixkit_test_variant"
_VARIANT, _TEXT = "_test_variant", "_test_text"


def whole_pass(
    model: nn.Module, tokens: Sequence[int], variant: Variant | Mapping[int, Variant], text: int | None = None
) -> Tensor:
    """``[len(tokens), vocab]`` logits, float32 at least; the variant of all layers, or of each by its number.

    Where it looks ahead, the first ``text`` tokens see one another as its mask says, those after them none later.
    """
    with _running(model, variant, len(tokens) if text is None else text), torch.no_grad():
        logits: Tensor = model(torch.tensor([list(tokens)], device=model.device)).logits[0]
    return logits if logits.dtype == torch.float64 else logits.float()


@contextmanager
def _running(model: nn.Module, variant: Variant | Mapping[int, Variant], text: int) -> Iterator[None]:
    """The model as it is, but for its attention function: it is not copied, which would take half of a pass."""
    layers, configs = list[nn.Module](), dict[int, tuple[Any, str]]()
    try:
        for module in model.modules():
            if hasattr(module, "config") and id(module.config) not in configs:
                configs[id(module.config)] = module.config, module.config._attn_implementation
                module.config._attn_implementation = NAME
            number = getattr(module, "layer_idx", None)
            own = variant if isinstance(variant, Variant) else variant.get(number)
            if number is not None and own is not None:
                layers.append(module)
                module.__dict__[_VARIANT], module.__dict__[_TEXT] = own, text
        yield
    finally:
        for module in layers:
            del module.__dict__[_VARIANT], module.__dict__[_TEXT]
        for config, name in configs.values():
            config._attn_implementation = name


def with_additive_mask(model: nn.Module, tokens: Sequence[int], bias: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The same under a bias that is added to scores, by the model's own code: as a mask ``[1, heads, T, T]``.

    ``bias``: of ``q_position [T, 1]`` and ``kv_position [1, T]``, to ``[heads, T, T]``.
    """
    at = torch.arange(len(tokens))
    mask = bias(at[:, None], at[None]).masked_fill(at[None] > at[:, None], torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(tokens)]), attention_mask=mask[None]).logits[0]
    return logits.float()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' eager functions: the layer's own cap and mask, the variant, the sinks."""
    groups = query.shape[1] // key.shape[1]
    variant: Variant | None = module.__dict__.get(_VARIANT)
    transforms = Transforms() if variant is None else variant.transforms
    query, key, value = (
        transforms.of(kind, rows[0].transpose(0, 1), torch.arange(rows.shape[2])).transpose(0, 1)[None]
        for kind, rows in (("query", query), ("key", key), ("value", value))
    )
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    at, heads = (torch.arange(of.shape[2 - dim], device=key.device) for of, dim in ((key, 0), (query, 1)))
    places = torch.zeros_like(at[0]), heads[:, None, None], at[:, None], at[None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = earlier = at[None] <= at[:, None]
    if attention_mask is not None:
        visible = visible & (attention_mask == 0)
    if variant is not None and variant.looks_ahead:
        visible = visible | (~earlier & (at[None] < module.__dict__[_TEXT]) & (at[:, None] < module.__dict__[_TEXT]))
    for mod in () if variant is None else variant.score_mods:
        scores = mod.function(scores, *places).to(scores.dtype)
    for mod in () if variant is None else variant.mask_mods:
        visible = visible & mod.function(*places)
    scores = scores.masked_fill(~visible, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : len(at)]
    out = (weights @ value.repeat_interleave(groups, 1))[0].transpose(0, 1)
    return transforms.of("output", out, at)[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)
