"""Caches that reach every attention layer, and what a layer finds in them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.attention.step import Step
from prefixkit.attention.variants import Variant
from prefixkit.models.indexing.text_positions import ShownLayers
from prefixkit.models.layer_pages import LayerPages
from prefixkit.models.model_errors import NotPatched
from prefixkit.models.variants.layer_scores import register_variant
from prefixkit.torch_private import mark_dynamic


class Compiled(Protocol):
    """Layers that run through torch.compile; see ``CompiledLayers``."""

    active: bool

    def begin(self, step: Step) -> None: ...

    def run(self, cache: Any, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


Bias = Callable[[], Variant]  # called where tensors have values


class LayerCache(Protocol):
    """What an attention module's original ``forward`` and our attention function find in place of a cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the ``[1, kv_heads, T, head_dim]`` keys and values of a forward pass; returns what to attend over."""

    def check(self, key: Tensor, value: Tensor, attention_mask: Any) -> None:
        """Raise unless attention was asked for over what :meth:`update` has returned, without a mask of its own."""

    def attend(
        self,
        query: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Tensor | None,
        bias: Bias | None = None,
    ) -> Tensor:
        """``query [1, heads, T, head_dim]`` to ``[1, T, heads, head_dim]``; ``bias`` makes a variant, as ALiBi, and
        sinks are ``[heads]``, or ``[T, heads]`` where the layer's own bias is added.
        """


class LayeredCache(Cache):
    """A cache of which every patched attention module gets a part of its own, for the length of a call.

    It holds no keys, so the base class, which sees no layers, answers as an empty cache: its length is zero, and it is
    not compileable.

    Attributes:
        num_layers: Attention modules.
        compiled: The layers that run through torch.compile, or None.
    """

    compiled: Compiled | None = None

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.layers = ShownLayers(self.text_positions)
        self.num_layers = num_layers

    def text_positions(self) -> Tensor:
        """``[3, 1, N]`` int64 the positions 0 to N - 1, as far as those of tokens that run go."""
        raise NotImplementedError

    @property
    def position_ids(self) -> Tensor:
        """The same, for models that ask a cache and none of its layers."""
        return self.text_positions()

    @position_ids.setter
    def position_ids(self, positions: Tensor) -> None:
        """What a model would keep for its next pass."""

    def layer(self, module: nn.Module, position_ids: Tensor | None) -> LayerCache:
        """The part of an attention module, for one call of its ``forward``, which may be told of positions."""
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        """NotPatched: only layers that ``patch`` has not touched get here; others write through their part."""
        raise NotPatched(
            f"layer {layer_idx} was given a {type(self).__name__}, but it is not patched; call prefixkit.patch(model) "
            "first, and after anything that wraps or replaces attention layers"
        )

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, as transformers writes "no maximum"."""
        return -1

    def __len__(self) -> int:
        return self.num_layers

    is_initialized = True
    is_croppable = False
    batch_size = 1  # one row of tokens, whatever the number of sequences

    @property
    def is_sliding(self) -> list[bool]:
        """Windows are the attention variants' business; every layer keeps all its KV."""
        return [False] * self.num_layers

    is_linear = is_dummy = is_sliding


class TracedStep:
    """The tensors of the step in progress, one object for all layers: inputs of graphs, read again at every call."""

    slots: Tensor
    positions: Tensor
    plans: list[list[Tensor]]

    def load(self, step: Step) -> None:
        """Take a step's tensors."""
        self.slots, self.positions, self.plans = step.slots, step.positions, [plan.tensors for plan in step.plans]
        # Numbers of rows, and a tree's and a plan's sizes, change from step to step: graphs are made for any.
        for tensor in (self.slots, self.positions, *chain(*self.plans)):
            if len(tensor) > 1:
                mark_dynamic(tensor, 0)


class Layer:
    """One layer's pages and the step in progress, in place of a cache for an attention module's ``forward``.

    Attributes:
        own: The layer's kind, plan and pages.
        step: The step in progress.
    """

    def __init__(self, own: LayerPages, step: Step | TracedStep) -> None:
        self.own, self.step = own, step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append what the layer caches of the step, ``[1, heads, T, head_dim]`` each, to the pages; returns it."""
        torch.ops.prefixkit.kv_append(
            key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), *self.own.pages, self.step.slots
        )
        return key_states, value_states

    def attend(
        self,
        query: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Tensor | None,
        bias: Bias | None = None,
    ) -> Tensor:
        """Attend over the tree: ``query [1, heads, T, k_dim]`` to ``[1, T, heads, v_dim]`` in the same dtype.

        ``window`` is not looked at: some models tell their attention functions of another than their masks have.
        """
        variant = self.variant(cap, sinks is not None, None if bias is None else bias())
        out: Tensor = torch.ops.prefixkit.tree_attention(
            self.scaled(query)[0].transpose(0, 1),
            *self.own.pages,
            self.step.positions,
            self.plan_under(variant, query.shape[1]),
            scale,
            variant,
            None if sinks is None else sinks.to(query.dtype),
        )[0]
        return out[None]

    def plan_under(self, variant: str, heads: int) -> list[Tensor]:
        """The plan, with what is known of its blocks under the variant's mask."""
        return self.plan

    @property
    def plan(self) -> list[Tensor]:
        """The step's plan for this kind of layers."""
        step = self.step
        return step.plans[self.own.plan] if isinstance(step, TracedStep) else step.plans[self.own.plan].tensors

    def scaled(self, query: Tensor) -> Tensor:
        """The query, scaled by its position where the layer's kind says so."""
        if self.own.kind.temperature is None:
            return query
        floor_scale, attn_scale = self.own.kind.temperature
        factor = torch.log1p(torch.floor((self.step.positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
        return (query * factor[:, None]).to(query.dtype)

    def variant(self, cap: float | None, sinks: bool, bias: Variant | None = None) -> str:
        """The key of :func:`register_variant`, with what the layer sees, and what its user adds; made once."""
        kind, known, asked = self.own.kind, self.own.keys, (cap, sinks, bias)
        if asked not in known:
            known[asked] = register_variant(kind.visible, cap, sinks, bias, kind.variant)
        return known[asked]

    def check(self, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> None:
        """Raise ValueError unless the mask is that of a step; the model's probe has seen what keys and values are."""
        self.check_mask(attention_mask)

    def check_mask(self, attention_mask: Tensor | None) -> None:
        """Raise ValueError unless the mask is the one of ``StepCache.inputs()``; a tree can honour no other."""
        if attention_mask is None or attention_mask.numel():
            given = "no attention mask" if attention_mask is None else f"a mask of shape {tuple(attention_mask.shape)}"
            raise ValueError(
                f"StepCache: layer {self.own.index} got {given} instead of the empty one of cache.inputs(). A tree "
                "has no padding, so a mask would be ignored: leave padding tokens out of the tree and call "
                "model(**cache.inputs())"
            )
