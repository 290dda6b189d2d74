"""The cache that carries a pool and the current step through a model to every attention layer."""

from __future__ import annotations

from functools import partialmethod
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache

from prefixkit.attention.step import Step
from prefixkit.models.errors import IncompleteStep, NotPatched
from prefixkit.ops.kv_pool import KVPool


class Compiled(Protocol):
    """Layers that run through torch.compile; see ``CompiledLayers``."""

    active: bool

    def begin(self, step: Step) -> None: ...

    def run(self, cache: StepCache, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class StepCache(Cache):
    """Takes a tree's KV pool into a patched model, as ``past_key_values``.

    One forward pass is one :class:`Step`::

        cache.begin(step)
        logits = model(**cache.inputs(), logits_to_keep=step.logit_rows).logits
        cache.end()

    The cache holds no keys itself and has no single length, so it has only the methods that a forward pass calls.  The
    tree decides which tokens are kept, cropped or reordered.

    Attributes:
        pool: The page tensors, made for this model's :func:`kv_spec`.
        attended: ``[layers]`` how often each layer has attended in the current step.
        position_ids: ``[1, T]`` int64 positions of the current step.
        variants: Keys of the attention variants that the layers have asked for.
        compiled: The layers that run through torch.compile, or None.
    """

    def __init__(self, pool: KVPool) -> None:
        super().__init__(layers=[])
        self.pool = pool
        self.attended = [0] * pool.spec.num_layers
        self.position_ids: Tensor | None = None
        self.variants: dict[tuple[object, ...], str] = {}
        self.compiled: Compiled | None = None
        # A mask of no elements: models pass a 4-D mask on as it is, so that no mask of T x KV elements is built, and
        # its arrival at a layer proves that no padding was dropped before.
        self._no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=pool.spec.device)
        self._step: Step | None = None

    @property
    def step(self) -> Step:
        """The step in progress; between steps, asking for it raises ValueError."""
        if self._step is None:
            raise ValueError("StepCache: no step in progress; call cache.begin(step) before the model")
        return self._step

    def begin(self, step: Step) -> None:
        """Start a step.

        Raises:
            ValueError: the step before was neither ended nor abandoned; see also ``CompiledLayers.begin``.
        """
        if self._step is not None:
            raise ValueError("StepCache.begin: the step before is still open; call end(), or abandon() if it failed")
        if self.compiled is not None:
            self.compiled.begin(step)
        self._step = step
        self.position_ids = step.positions[None]
        self.attended = [0] * self.pool.spec.num_layers

    def inputs(self) -> dict[str, Any]:
        """The keywords to call the model with: ``input_ids``, ``position_ids`` int64 ``[1, T]``, a mask, this cache."""
        return {
            "input_ids": self.step.tokens[None],
            "position_ids": self.position_ids,
            "attention_mask": self._no_mask,
            "past_key_values": self,
            "use_cache": True,
        }

    def end(self) -> None:
        """Finish the step, and check that it went through every layer.

        Raises:
            ValueError: no step is in progress.
            IncompleteStep: a layer was not reached exactly once, so the KV of this step is not complete.
        """
        if self._step is None:
            raise ValueError("StepCache.end: no step in progress; call cache.begin(step) first")
        self.abandon()
        missed = [layer for layer, calls in enumerate(self.attended) if calls != 1]
        if missed:
            raise IncompleteStep(
                f"StepCache.end: layers {missed} of {len(self.attended)} did not attend to the tree exactly once. "
                "Something calls their forward behind the patch (a wrapper, a compiled copy), or the model skips "
                "layers: patch the model again after whatever wrapped it"
            )

    def abandon(self) -> None:
        """Drop the step without a check, after an error."""
        self._step = self.position_ids = None

    # What a forward pass calls.  The base class, which sees no layers, answers as an empty cache: its length is zero,
    # and it is not compileable.  No mask of its sizes is used, because layers accept only the one of `inputs`.

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Only layers that ``patch`` has not touched get here; patched ones write through their :class:`CacheLayer`.

        Raises:
            NotPatched: always.
        """
        raise NotPatched(
            f"layer {layer_idx} was given a StepCache, but it is not patched; call prefixkit.patch(model) first, and "
            "after anything that wraps or replaces attention layers"
        )

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, as transformers writes "no maximum"."""
        return -1

    def __len__(self) -> int:
        return self.pool.spec.num_layers

    def __repr__(self) -> str:
        spec = self.pool.spec
        state = "between steps" if self._step is None else f"in a step of {self._step.tokens.shape[0]} tokens"
        return f"StepCache({spec.num_layers} layers, {spec.kv_heads} KV heads of {spec.head_dim}, {state})"

    is_initialized = True
    is_croppable = False
    batch_size = 1  # one row of tokens, whatever the number of sequences

    @property
    def is_sliding(self) -> list[bool]:
        """Windows are the attention variants' business; every layer keeps all its KV."""
        return [False] * self.pool.spec.num_layers

    is_linear = is_dummy = is_sliding


def _refuse(cache: StepCache, *args: Any, method: str, **kwargs: Any) -> NoReturn:
    raise TypeError(f"StepCache.{method}: the tree decides whose KV is kept; use PrefixTree's fork, trim and release")


# What would change which KV is kept.  The base class, which sees no layers, would silently do nothing.
for _method in ("reorder_cache", "crop", "reset", "batch_repeat_interleave", "batch_select_indices"):
    setattr(StepCache, _method, partialmethod(_refuse, method=_method))
