"""What an attention mask that a model made shows to each of its queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def shown_wrongly(mask: Any, length: int, rows: int, window: int | None) -> str | None:
    """What a model's mask has that attention over a tree would not know of; None if nothing.

    Args:
        mask: What a layer got as its attention mask: bool or additive ``[1, 1 or heads, rows, tokens]``, a BlockMask of
            FlexAttention, or None and ``[1, tokens]`` where the attention function makes the mask itself.
        length: Tokens before the first query.
        rows: Queries.
        window: The window that the attention function is told of.
    """
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return None
    query, key = torch.arange(length, length + rows)[:, None], torch.arange(length + rows)
    if (mask_mod := getattr(mask, "mask_mod", None)) is not None:
        device = mask.kv_indices.device
        none = torch.zeros((), dtype=torch.int64, device=device)
        shown = mask_mod(none, none, (query - length).to(device), key.to(device))
    elif isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] == rows and mask.shape[3] >= length + rows:
        mask = mask[..., : length + rows]
        if mask.dtype != torch.bool:
            hidden = mask <= torch.finfo(mask.dtype).min / 2
            if (mask.masked_fill(hidden, 0) != 0).any():
                return "gets a mask that adds to the scores, as ALiBi does; attention over a tree is not told of that"
            mask = ~hidden
        shown = mask
    else:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        return f"gets a mask of a kind that is not known, {shape}"
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    wrong = (shown.cpu() != expected).nonzero()
    if not len(wrong):
        return None
    row, at = wrong[-1, -2].item(), wrong[-1, -1].item()
    told = "no window" if window is None else f"a window of {window} tokens"
    return (
        f"gets a mask that {'hides' if expected[row, at] else 'shows'} the token {length + row - at} before a query, but "
        f"its attention function is told of {told}; a tree goes by what the function is told, and would ignore the mask"
    )
