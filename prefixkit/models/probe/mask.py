"""The window of attention, read from a mask that the model made."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.visible import Visible


class UnknownMask(ValueError):
    """A mask hides or changes scores in a way that no window of causal attention does."""


def window_of(mask: Any, length: int, rows: int, told: int | None) -> int | None:
    """The window of causal attention that a model's mask shows; None if it shows no limit.

    Args:
        mask: What a layer got as its attention mask: bool or additive ``[1, 1 or heads, rows, tokens]``, a BlockMask of
            FlexAttention, or None and ``[1, tokens]`` where the attention function makes the mask itself.
        length: Tokens before the first query.
        rows: Queries.
        told: The window passed to the attention function; it counts if the mask shows no other.

    Raises:
        UnknownMask: the mask is not that of causal attention in a window.
    """
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return told
    shown = _shown(mask, length, rows)
    counts = np.count_nonzero(shown.numpy(), axis=-1).reshape(-1, rows)
    queries = np.arange(length, length + rows)
    for window in (told, int(counts[-1, -1])):
        # Counts are compared first, for a long mask takes as long to compare as the model takes to run.
        whole = np.minimum(queries + 1, window or length + rows)
        if (counts == whole).all() and all(
            shown[..., row, query + 1 - count : query + 1].numpy().all()
            for row, (query, count) in enumerate(zip(queries.tolist(), whole.tolist(), strict=True))
        ):
            return None if window == length + rows else window
    query, key = torch.from_numpy(queries)[:, None], torch.arange(length + rows)
    expected = (key <= query) & (key > query - (window or length + rows))
    wrong = (shown != expected).nonzero()
    row, at = wrong[-1, -2:].tolist()
    raise UnknownMask(
        f"gets a mask that {'hides' if expected[row, at] else 'shows'} the token {length + row - at} before a query, "
        f"which is not attention in a window, here of {window} tokens; a tree would ignore that mask"
    )


def chunk_of(mask: Any, length: int, rows: int) -> int | None:
    """The size of the chunks that a mask limits queries to; None unless the mask shows a chunk's start among them."""
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return None
    shown = _shown(mask, length, rows)
    first = shown.reshape(-1, rows, length + rows)[0].numpy().argmax(1).tolist()
    size = first[-1] - first[0]
    if {*first} != {first[0], first[-1]}:  # as in a window, where each query sees another first token
        return None
    query, key = torch.arange(length, length + rows)[:, None], torch.arange(length + rows)
    chunked = size > 0 and bool((shown == ((key <= query) & (key // size == query // size))).all())
    return size if chunked else None


def visible_by(mask: Any, length: int, rows: int, told: int | None) -> Visible:
    """The chunk that a model's mask shows, or else the window; arguments as for :func:`window_of`."""
    chunk = chunk_of(shown := shown_by(mask, length, rows), length, rows)
    return Visible(chunk=chunk) if chunk else Visible(window_of(shown, length, rows, told))


def shown_by(mask: Any, length: int, rows: int) -> Tensor | None:
    """``[1, 1 or heads, rows, length + rows]`` bool: what a mask shows, on the CPU; a mask too, but read faster.

    None where the attention function makes the mask itself.

    Raises:
        UnknownMask: the mask does not only hide and show.
    """
    return None if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2) else _shown(mask, length, rows)


def _shown(mask: Any, length: int, rows: int) -> Tensor:
    """``[1, 1 or heads, rows, length + rows]`` bool: what a mask shows, on the CPU."""
    if (mask_mod := getattr(mask, "mask_mod", None)) is not None:
        none = torch.zeros((), dtype=torch.int64, device=mask.kv_indices.device)
        query, key = torch.arange(rows, device=none.device), torch.arange(length + rows, device=none.device)
        shown: Tensor = mask_mod(none, none, query[:, None], key)
        return shown.cpu()[None, None]
    if not (isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] == rows and mask.shape[3] >= length + rows):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnknownMask(f"gets a mask of a kind that is not known, {shape}")
    own: Tensor = mask[..., : length + rows].detach().cpu()
    if own.dtype == torch.bool:
        return own
    # numpy compares the values of a long mask several times as fast as torch does.
    values = (own.float() if own.element_size() < 4 else own).numpy()
    visible, hidden = values == 0, values <= torch.finfo(own.dtype).min / 2
    if np.count_nonzero(visible) + np.count_nonzero(hidden) != values.size:
        raise UnknownMask(
            "gets a mask that adds to the scores, as ALiBi does; attention over a tree is not told of that"
        )
    return torch.from_numpy(visible)
