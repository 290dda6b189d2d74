"""A StepCache as one attention layer sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.attention.step import Step
from prefixkit.attention.variants import Variant, attention_sinks, compose, register, sliding_window, soft_cap
from prefixkit.models.errors import IncompleteStep
from prefixkit.models.step_cache import StepCache
from prefixkit.ops.kv_pool import KVPool


def register_variant(window: int | None, cap: float | None, sinks: Tensor | None, owner: object | None = None) -> str:
    """Register causal attention with what an attention class asks of its attention function.

    Args:
        window: A query at position p sees keys at positions in ``(p - window, p]``; None for all.
        cap: Scores are bounded by ``cap * tanh(score / cap)``; None for no bound.
        sinks: ``[heads]`` logits that join the softmax's denominator; None for none.
        owner: Whose sinks these are: weights, whose numbers change, so the variant goes with its owner.  Variants
            without sinks are few, and stay.

    Returns:
        The variant's key, for the ops.
    """
    parts: list[Variant] = []
    if cap is not None:
        parts.append(soft_cap(cap))
    if window is not None:
        parts.append(sliding_window(window))
    if sinks is not None:
        parts.append(attention_sinks(sinks))
    return register(compose(*parts), None if sinks is None else owner)


class TracedStep:
    """The tensors of the step in progress, one object for all layers: inputs of graphs, read again at every call."""

    slots: Tensor
    positions: Tensor
    plan: list[Tensor]

    def load(self, step: Step) -> None:
        """Take a step's tensors."""
        self.slots, self.positions, self.plan = step.slots, step.positions, step.plan
        # Numbers of rows, and a tree's and a plan's sizes, change from step to step: graphs are made for any.
        for tensor in (self.slots, self.positions, *self.plan):
            if len(tensor) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


class Layer:
    """One layer's pages and the step in progress, in place of a cache for an attention module's ``forward``.

    Attributes:
        index: The layer's number.
        k_pages, v_pages: Its pages.
        step: The step in progress.
    """

    def __init__(self, index: int, pool: KVPool, step: Step | TracedStep) -> None:
        self.index = index
        self.k_pages = pool.k(index)
        self.v_pages = pool.v(index)
        self.step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the step's K and V, ``[1, kv_heads, T, head_dim]`` each, to the pages; returns them unchanged."""
        torch.ops.prefixkit.kv_append(
            key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), self.k_pages, self.v_pages, self.step.slots
        )
        return key_states, value_states

    def attend(
        self, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend over the tree: ``query [1, heads, T, head_dim]`` to ``[1, T, heads, head_dim]`` in the same dtype."""
        step = self.step
        out: Tensor = torch.ops.prefixkit.tree_attention(
            query[0].transpose(0, 1),
            self.k_pages,
            self.v_pages,
            step.positions,
            step.plan,
            scale,
            self.variant(window, cap, sinks),
        )[0]
        return out[None]

    def variant(self, window: int | None, cap: float | None, sinks: Tensor | None) -> str:
        """The key of :func:`register_variant`."""
        raise NotImplementedError

    def check_mask(self, attention_mask: Tensor | None) -> None:
        """Raise ValueError unless the mask is the one of ``StepCache.inputs()``; a tree can honour no other."""
        if attention_mask is None or attention_mask.numel():
            given = "no attention mask" if attention_mask is None else f"a mask of shape {tuple(attention_mask.shape)}"
            raise ValueError(
                f"StepCache: layer {self.index} got {given} instead of the empty one of cache.inputs(). A tree "
                "has no padding, so a mask would be ignored: leave padding tokens out of the tree and call "
                "model(**cache.inputs())"
            )


class CacheLayer(Layer):
    """One layer's part of a :class:`StepCache`, for the length of one forward call.

    The original attention ``forward`` receives it as its cache and calls :meth:`update`; then our attention function
    calls :meth:`attend`.  It exists during the call only, so a failed call leaves nothing behind.
    """

    def __init__(self, cache: StepCache, index: int) -> None:
        if not 0 <= index < len(cache.attended):
            raise ValueError(
                f"StepCache: layer {index} of the model asked for KV, but the pool was made for "
                f"{len(cache.attended)} layers; make it with KVPool(kv_spec(model), ...)"
            )
        super().__init__(index, cache.pool, cache.step)
        self.cache = cache
        self.appended = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The same, after a check of the layer, the shapes and the dtypes."""
        if layer_idx != self.index or self.appended or self.cache.attended[self.index]:
            raise IncompleteStep(
                f"StepCache: layer {self.index} wrote KV twice in one step, or wrote for layer {layer_idx}; each "
                "attention layer must run once a step, on KV of its own"
            )
        spec = self.cache.pool.spec
        key_states, value_states = self._rounded(key_states), self._rounded(value_states)
        expected = (1, spec.kv_heads, self.step.slots.shape[0], spec.head_dim)
        for name, states in (("keys", key_states), ("values", value_states)):
            if states.shape != expected or states.dtype != spec.dtype:
                raise ValueError(
                    f"StepCache: layer {self.index} made {name} of shape {tuple(states.shape)} {states.dtype}, "
                    f"but the step and the pool take {expected} {spec.dtype} (batch, KV heads, tokens, head_dim); "
                    "make the pool with KVPool(kv_spec(model), ...) and call model(**cache.inputs())"
                )
        super().update(key_states, value_states, layer_idx)
        self.appended = True
        return key_states, value_states

    def _rounded(self, states: Tensor) -> Tensor:
        """Under autocast, which does so in the products of attention, in the pool's dtype."""
        return states.to(self.k_pages.dtype) if torch.is_autocast_enabled(states.device.type) else states

    def attend(
        self, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """The same, after a check that the layer has appended."""
        if not self.appended:
            raise IncompleteStep(
                f"StepCache: layer {self.index} attends without KV of its own; layers that share KV are not supported"
            )
        out = super().attend(self._rounded(query), scale, window, cap, sinks)
        self.cache.attended[self.index] += 1
        return out

    def variant(self, window: int | None, cap: float | None, sinks: Tensor | None) -> str:
        # Kept with the cache, because the values of sinks are part of a key: they hold as long as KV made with the
        # same weights does.
        asked = (self.index, window, cap, sinks is None)
        if asked not in self.cache.variants:
            self.cache.variants[asked] = register_variant(window, cap, sinks, self.cache)
        return self.cache.variants[asked]

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Raise ValueError if the model says that its position embeddings were made for other positions."""
        if position_ids is None or position_ids is self.cache.position_ids:
            return
        if not torch.equal(position_ids.reshape(-1), self.step.positions):
            raise ValueError(
                "StepCache: the model ran with position_ids other than the step's, so its position embeddings "
                "are wrong; call model(**cache.inputs())"
            )
