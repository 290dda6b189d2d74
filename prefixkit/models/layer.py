"""The object that an attention layer gets as its cache: the layer's pages, and the step in progress."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.attention.rotation import Angles, angles, rotate
from prefixkit.attention.step import Step
from prefixkit.attention.variants import Variant
from prefixkit.models.layered_cache import Bias
from prefixkit.models.steps.layer_pages import LayerPages
from prefixkit.models.steps.traced_step import TracedStep
from prefixkit.models.variants.layer_scores import register_variant
from prefixkit.ops.streaming import Rotated, streaming_attention


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
        """Append the step's K and V, ``[1, heads, T, head_dim]`` each, to the layer's pages; returns K and V."""
        key, value = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        if (user := self.own.kind.variant) is not None:
            key = user.transforms.of("key", key, self.step.positions)
            value = user.transforms.of("value", value, self.step.positions)
        torch.ops.prefixkit.kv_append(key, value, *self.own.pages, self.step.slots)
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

        ``window`` is ignored: some models pass their attention functions another window than their masks show.
        """
        keys = self.variants(cap, sinks is not None, None if bias is None else bias())
        positions, plan = self.step.positions, self.plan_under_mask
        q, logits = self.asked(query, positions), None if sinks is None else sinks.to(query.dtype)
        if self.own.sinks is None:
            out, _ = torch.ops.prefixkit.tree_attention(q, *self.own.pages, positions, plan, scale, *keys, logits)
        else:
            near, far = Rotated(q, positions, plan, keys[0]), self.at_sinks(query, keys[1])
            out, _ = streaming_attention(near, far, self.own.pages, scale, logits)
        return self.finished(out)

    @property
    def plan_under_mask(self) -> list[Tensor]:
        """The plan, with the classes of its blocks under the masks of the layer's kind where these are known."""
        return self.plan

    @property
    def plan(self) -> list[Tensor]:
        """The step's plan for this kind of layers."""
        return self.plan_of(self.own.plan)

    def plan_of(self, number: int) -> list[Tensor]:
        """One of the step's plans."""
        step = self.step
        return step.plans[number] if isinstance(step, TracedStep) else step.plans[number].tensors

    def asked(self, query: Tensor, positions: Tensor) -> Tensor:
        """``[1, heads, T, k_dim]`` to ``[T, heads, k_dim]``: queries scaled by position if the layer's kind says so,
        then transformed by the user's variant.
        """
        q = self.scaled(query)[0].transpose(0, 1)
        user = self.own.kind.variant
        return q if user is None else user.transforms.of("query", q, positions)

    def at_sinks(self, query: Tensor, variant: str) -> Rotated:
        """The queries rotated to their positions in the cache."""
        user, rotation, number = self.own.kind.variant, self.own.kind.rotation, self.own.sinks
        assert user is not None and user.streaming is not None and number is not None, "of a layer that streams"
        at, frequencies = user.streaming.in_cache(self.step.positions), self.own.frequencies
        if rotation is not None and frequencies is not None:
            turned = rotate(query[0].transpose(0, 1), self.turned(frequencies, at), rotation.interleaved)
            query = turned.transpose(0, 1)[None]
        return Rotated(self.asked(query, at), at, self.plan_of(number), variant)

    def turned(self, frequencies: Tensor, target: Tensor) -> Angles:
        """The angles that rotate the step's queries to ``target`` positions."""
        return angles(frequencies, self.step.positions, target)

    def finished(self, out: Tensor) -> Tensor:
        """``[T, heads, v_dim]`` to ``[1, T, heads, v_dim]``: outputs transformed by the user's variant."""
        user = self.own.kind.variant
        return (out if user is None else user.transforms.of("output", out, self.step.positions))[None]

    def scaled(self, query: Tensor) -> Tensor:
        """The queries, scaled by their positions where the layer's kind says so."""
        if self.own.kind.temperature is None:
            return query
        floor_scale, attn_scale = self.own.kind.temperature
        factor = torch.log1p(torch.floor((self.step.positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
        return (query * factor[:, None]).to(query.dtype)

    def variants(self, cap: float | None, sinks: bool, bias: Variant | None = None) -> tuple[str, ...]:
        """The keys from :func:`register_variant`, one for each part that an op computes, of the layer's own attention
        and its user's variant; made once.
        """
        kind, known, asked = self.own.kind, self.own.keys, (cap, sinks, bias)
        if asked not in known:
            users = (None,) if kind.variant is None else kind.variant.parts
            first = register_variant(kind.visible, cap, sinks, bias, users[0])
            others = (register_variant(kind.visible, cap, False, bias, user) for user in users[1:])
            known[asked] = (first, *others)
        return known[asked]

    def check(self, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> None:
        """Raise ValueError unless the mask is that of a step; the model's probe has checked keys and values."""
        self.check_mask(attention_mask)

    def check_mask(self, attention_mask: Tensor | None) -> None:
        """Raise ValueError unless the mask is the one of ``StepCache.inputs()``; a tree supports no other."""
        if attention_mask is None or attention_mask.numel():
            given = "no attention mask" if attention_mask is None else f"a mask of shape {tuple(attention_mask.shape)}"
            raise ValueError(
                f"StepCache: layer {self.own.index} got {given} instead of the empty one of cache.inputs(). A tree "
                "has no padding, so a mask would be ignored: leave padding tokens out of the tree and call "
                "model(**cache.inputs())"
            )
