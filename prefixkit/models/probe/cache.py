"""A cache that stands for a text, and notes what each attention layer of a model does with it."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from prefixkit.models.attention_class import SCALES, original_class
from prefixkit.models.layer import LayeredCache
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.probe.mask import UnknownMask, chunk_of, window_of

ROWS = 4  # tokens of a pass; the last is the first once more, at its position


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer works on.

    Attributes:
        heads: Query heads; those of this process under tensor parallelism, as ``kv_heads``.
        kv_heads: KV heads.
        head_dim: Elements of a head.
        dtype: Of the keys and values.
        device: Where they are made.
        window: Tokens that a query sees, itself included; None for all.  Layers may differ in it and be alike.
        longest: Tokens that a text may have: of one chunk of attention, and before queries are scaled; None for any.
        counts_from_zero: Keys are the same without position_ids as with those that count from 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = field(default=None, compare=False)
    longest: int | None = field(default=None, compare=False)
    counts_from_zero: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        return f"{self.heads} query and {self.kv_heads} KV heads of {self.head_dim}, {self.dtype} on {self.device}"


class Enough(Exception):
    """The first layer was seen."""


class ProbeCache(LayeredCache):
    """Stands for a cache, and notes what each layer, an attention module by name, does.

    Args:
        length: Tokens that it claims to hold, of which there are none; None: it stands for a step over a tree, whose
            mask must arrive.
        shapes_only: The pass ends at the first attention, as tensors have no values.
    """

    def __init__(self, layers: dict[str, nn.Module], length: int | None, shapes_only: bool = False) -> None:
        super().__init__(len(layers))
        self.length, self.shapes_only = length, shapes_only
        self.is_initialized = length != 0
        self.names = list(layers)
        self.shapes: list[LayerShape] = []
        self.rows: list[Tensor] = []  # of each layer: [ROWS, what a row's query, keys and values are]

    def layer(self, module: nn.Module, position_ids: Tensor | None) -> ProbedLayer:
        return ProbedLayer(self, module)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length or 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        new = len(query_length) if isinstance(query_length, Tensor) else query_length  # positions, before 5.20
        return (self.length or 0) + new, 0


class ProbedLayer:
    """One layer's part of a :class:`ProbeCache`."""

    def __init__(self, cache: ProbeCache, module: nn.Module) -> None:
        self._cache, self._module, self._kv = cache, module, list[Tensor]()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._kv or layer_idx != len(self._cache.shapes):
            self._refuse(f"caches KV out of order, of layer {layer_idx} after {len(self._cache.shapes)} layers")
        k, v = key_states, value_states
        if k.ndim != 4 or k.shape[0] != 1 or k.shape[2] != ROWS or k.shape != v.shape:
            self._refuse(
                f"caches keys of shape {tuple(k.shape)} and values of {tuple(v.shape)} for {ROWS} tokens; a pool holds "
                "both in one shape [1, kv_heads, tokens, head_dim], no latents"
            )
        self._kv = [k, v]
        return k, v

    def check(self, key: Tensor, value: Tensor, attention_mask: Any) -> None:
        if not self._kv:
            self._refuse("attends without KV of its own: it shares that of another layer")
        for given, cached in zip((key, value), self._kv, strict=True):
            there = self._cache.shapes_only or given.shape != cached.shape or bool((given == cached).all())
            if given is not cached and (given.shape != cached.shape or not there):
                self._refuse(
                    f"attends over other keys or values, {tuple(given.shape)}, than it caches, {tuple(cached.shape)}"
                )
        self._mask = attention_mask

    def attend(
        self, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        k, v = self._kv
        scales = self._module.__dict__.get(SCALES) and not self._module.__dict__.get("use_rope")
        longest = math.ceil(self._module.__dict__["floor_scale"]) - 1 if scales else None
        if (length := self._cache.length) is not None:
            try:
                if chunk := chunk_of(self._mask, length, ROWS):
                    window, longest = None, min(chunk, longest or chunk)
                else:
                    window = window_of(self._mask, length, ROWS, window)
            except UnknownMask as error:
                self._refuse(str(error))
        shape = LayerShape(query.shape[1], k.shape[1], k.shape[3], _smaller(k, v), k.device, window, longest)
        self._cache.shapes.append(shape)
        if self._cache.shapes_only:
            raise Enough
        if self._cache.length is None:
            if not isinstance(self._mask, Tensor) or self._mask.numel():
                self._refuse("gets another mask than the model was given, so it is not known what is hidden from it")
            self._compare(query, scale, window, cap, sinks)
        self._cache.rows.append(torch.cat([of[0].transpose(0, 1).flatten(1).float() for of in (query, k, v)], 1))
        return v.repeat_interleave(shape.heads // shape.kv_heads, 1).transpose(1, 2).to(query.dtype).contiguous()

    def _compare(
        self, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> None:
        """Refuse a layer whose attention function means something else by its arguments than attention over a tree."""
        eager = inspect.unwrap(original_class(self._module).forward).__globals__.get("eager_attention_forward")
        if eager is None:
            return
        k, v = self._kv
        at = torch.arange(ROWS, device=query.device)
        hidden = at > at[:, None]
        if window is not None:
            hidden |= at <= at[:, None] - window
        mask = torch.zeros(1, 1, ROWS, ROWS, dtype=query.dtype, device=query.device)
        mask.masked_fill_(hidden, torch.finfo(query.dtype).min)
        others = {"sliding_window": window, "softcap": cap, "s_aux": sinks}
        given = {name: value for name, value in others.items() if value is not None}
        theirs = eager(self._module, query, k, v, mask, scaling=scale, dropout=0.0, **given)[0].double()
        q, k, v = (of.double() for of in (query, *self._kv))
        k, v = (of.repeat_interleave(q.shape[1] // of.shape[1], 1) for of in (k, v))
        scores = q @ k.transpose(2, 3) * scale
        # Products are rounded before the softmax, which is of float32, weights and values after it.
        eps = max(torch.finfo(dtype).eps for dtype in (_smaller(*self._kv), torch.float32))
        allowed = eps * (16 + 4 * scores.abs().max()) * v.abs().max()
        scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(1, -1, ROWS, 1)], 3)
        ours = (scores.softmax(3)[..., :ROWS] @ v).transpose(1, 2)
        if theirs.shape != ours.shape or not (error := (theirs - ours).abs().max()) <= allowed:
            self._refuse(
                "attends in a way of its own: its eager function and softmax(scale q k) v, with the window, cap and "
                f"sinks that it is told of, differ by {error:.1e}"
            )

    def _refuse(self, what: str) -> NoReturn:
        index = getattr(self._module, "layer_idx", 0)
        raise UnsupportedModel(f"{self._cache.names[index]} ({original_class(self._module).__name__}) {what}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"asks its cache for {name!r}, which a tree does not have for a step of many sequences")


def _smaller(k: Tensor, v: Tensor) -> torch.dtype:
    """Under autocast keys that were rotated in float32 are rounded to what values are, when they are used."""
    return min(k.dtype, v.dtype, key=lambda dtype: dtype.itemsize)
