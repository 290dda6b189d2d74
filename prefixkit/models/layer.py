"""A TreeCache as one attention layer sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.models.errors import IncompleteStep
from prefixkit.models.tree_cache import TreeCache
from prefixkit.models.variants import register_variant


class CacheLayer:
    """One layer's part of a :class:`TreeCache`, for the length of one forward call.

    The original attention ``forward`` receives it as its cache and calls :meth:`update`; then our attention function
    calls :meth:`attend`.  It exists during the call only, so a failed call leaves nothing behind.
    """

    __slots__ = ("appended", "cache", "index")

    def __init__(self, cache: TreeCache, index: int) -> None:
        if not 0 <= index < len(cache.attended):
            raise ValueError(
                f"TreeCache: layer {index} of the model asked for KV, but the pool was made for "
                f"{len(cache.attended)} layers; make it with KVPool(kv_spec(model), ...)"
            )
        self.cache = cache
        self.index = index
        self.appended = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the step's K and V, ``[1, kv_heads, T, head_dim]`` each, to the pool; returns them unchanged."""
        pool, step = self.cache.pool, self.cache.step
        if layer_idx != self.index or self.appended or self.cache.attended[self.index]:
            raise IncompleteStep(
                f"TreeCache: layer {self.index} wrote KV twice in one step, or wrote for layer {layer_idx}; each "
                "attention layer must run once a step, on KV of its own"
            )
        spec = pool.spec
        expected = (1, spec.kv_heads, step.tokens.shape[0], spec.head_dim)
        for name, states in (("keys", key_states), ("values", value_states)):
            if states.shape != expected or states.dtype != spec.dtype:
                raise ValueError(
                    f"TreeCache: layer {self.index} made {name} of shape {tuple(states.shape)} {states.dtype}, "
                    f"but the step and the pool take {expected} {spec.dtype} (batch, KV heads, tokens, head_dim); "
                    "make the pool with KVPool(kv_spec(model), ...) and call model(**cache.inputs())"
                )
        pool.append(self.index, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), step.slots)
        self.appended = True
        return key_states, value_states

    def attend(
        self, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend over the tree: ``query [1, heads, T, head_dim]`` to ``[1, T, heads, head_dim]`` in the same dtype."""
        if not self.appended:
            raise IncompleteStep(
                f"TreeCache: layer {self.index} attends without KV of its own; layers that share KV are not supported"
            )
        pool, step = self.cache.pool, self.cache.step
        out: Tensor = torch.ops.prefixkit.tree_attention(
            query[0].transpose(0, 1),
            pool.k(self.index),
            pool.v(self.index),
            step.positions,
            step.plan,
            scale,
            self._variant(window, cap, sinks),
        )[0]
        self.cache.attended[self.index] += 1
        return out[None]

    def _variant(self, window: int | None, cap: float | None, sinks: Tensor | None) -> str:
        # Kept with the cache, because the values of sinks are part of a key: they hold as long as KV made with the
        # same weights does.
        asked = (self.index, window, cap, sinks is None)
        if asked not in self.cache.variants:
            self.cache.variants[asked] = register_variant(window, cap, sinks, self.cache)
        return self.cache.variants[asked]

    def check_mask(self, attention_mask: Tensor | None) -> None:
        """Check that the mask is the one of ``TreeCache.inputs()``; a tree can honour no other.

        Raises:
            ValueError: it is not.
        """
        if attention_mask is None or attention_mask.numel():
            given = "no attention mask" if attention_mask is None else f"a mask of shape {tuple(attention_mask.shape)}"
            raise ValueError(
                f"TreeCache: layer {self.index} got {given} instead of the empty one of cache.inputs(). A tree "
                "has no padding, so a mask would be ignored: leave padding tokens out of the tree and call "
                "model(**cache.inputs())"
            )

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Check that the position embeddings were made for the step's positions, where the model says for which.

        Raises:
            ValueError: they were made for others.
        """
        step = self.cache.step
        if position_ids is None or position_ids is self.cache.position_ids:
            return
        if not torch.equal(position_ids.reshape(-1), step.positions):
            raise ValueError(
                "TreeCache: the model ran with position_ids other than the step's, so its position embeddings "
                "are wrong; call model(**cache.inputs())"
            )
