"""The cache that carries a pool and the current step through a model to every attention layer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partialmethod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from prefixkit.attention.rotation import Angles
from prefixkit.attention.step import Step
from prefixkit.kv.kv_pool import KVPool
from prefixkit.models.attention_class import layer_number
from prefixkit.models.indexing.indexers import Block
from prefixkit.models.indexing.plain_layer import PlainLayer
from prefixkit.models.layered_cache import Bias
from prefixkit.models.model_errors import IncompleteStep
from prefixkit.models.requirements import CACHE
from prefixkit.models.states.step_states import run_step
from prefixkit.models.states.taken_cache import step_inputs
from prefixkit.models.steps.asked_lengths import AskedLengths
from prefixkit.models.steps.layer_pages import LayerPages, places_of
from prefixkit.models.steps.other_devices import OTHER_POSITIONS, OtherDevices
from prefixkit.models.variants.masked_plans import masked_plan


def empty_mask(device: torch.device) -> Tensor:
    """A mask without elements, which makes models apply none.

    Models pass a 4-D mask on as it is, so that they build no mask of T x KV elements, and its arrival at a layer proves
    that no padding was dropped before.
    """
    return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=device)


class StepCache(AskedLengths):
    """Takes a tree's KV pool into a patched model, as its cache.

    One forward pass is one :class:`Step`::

        cache.begin(step)
        logits = model(**cache.inputs(), logits_to_keep=step.logit_rows).logits
        cache.end()

    The cache holds no keys itself and has no single length, so it has only the methods that a forward pass calls.  The
    tree decides which tokens are kept, cropped or reordered.

    Attributes:
        pool: The page tensors, made for this model's :func:`kv_spec`.
        layer_pages: The kind, plan and pages of each attention layer.
        places: For the number of each attention module, the layers that it computes, one after another in a step.
        mixers: The same for each module that keeps a state: the places of its states in the pool.
        attended: ``[layers + states]`` how often each has run in the current step.
        given_positions: ``[1, T]`` int64 positions of the current step.
        keyword: The keyword for the cache in the model's ``forward``.
        takes: The model whose keywords :meth:`inputs` uses, if it has no attention.
    """

    def __init__(self, pool: KVPool, layers: Sequence[LayerPages], mixers: Sequence[nn.Module] = ()) -> None:
        super().__init__(len(layers))
        self.keyword = CACHE
        self.takes: nn.Module | None = None
        self.pool, self.layer_pages, self.biased = pool, layers, any(one.kind.biased for one in layers)
        self.places = places_of([layer.module for layer in layers])
        self.mixers = places_of(mixers)
        self.attended = [0] * (len(layers) + len(mixers))
        self.given_positions: Tensor | None = None
        self._no_mask = empty_mask(pool.spec.device)
        self._others: OtherDevices | None = None  # the step in progress on other devices than the first layer's
        self._mixers_elsewhere = [None if of == pool.spec.device else of for of in pool.states.devices]
        self.masked_plans: dict[tuple[int, str], list[Tensor]] = {}  # the step's plans with classes of blocks
        self.turned: dict[Hashable, Angles] = {}  # the angles that rotate the step's queries
        self.blocks: dict[int, list[Block]] = {}  # the step's rows as indexers take them,
        self.equal_blocks: dict[int, list[Block]] = {}  # and compressors

    @property
    def step(self) -> Step:
        """The step in progress; raises ValueError between steps."""
        if self._step is None:
            raise ValueError("StepCache: no step in progress; call cache.begin(step) before the model")
        return self._step

    def begin(self, step: Step) -> None:
        """Start a step.

        Raises:
            ValueError: the last step was neither ended nor abandoned; see also ``CompiledLayers.begin``.
        """
        if self._step is not None:
            raise ValueError("StepCache.begin: the step before is still open; call end(), or abandon() if it failed")
        if self.compiled is not None:
            self.compiled.start_step(step)
        self._step, self.blocks, self.equal_blocks, self.masked_plans, self.turned = step, {}, {}, {}, {}
        self.given_positions, self._others = step.positions[None], None
        self.attended = [0] * len(self.attended)

    def step_on(self, device: torch.device | None) -> Step:
        """The step in progress for layers on another device than the first layer's (None: on that); copied once."""
        return self.step if device is None else self.others().step_on(device)

    def others(self) -> OtherDevices:
        """The step in progress on other devices."""
        self._others = self._others or OtherDevices(self.step)
        return self._others

    def inputs(self) -> dict[str, Any]:
        """The keywords to call the model with: ``input_ids``, ``position_ids`` int64 ``[1, T]``, a mask, this cache."""
        given = {
            "input_ids": self.step.tokens[None],
            "position_ids": self.given_positions,
            "attention_mask": self._no_mask,
            "use_cache": True,
        }
        return {self.keyword: self, **given} if self.takes is None else step_inputs(self.takes, self, given)

    def layer(self, module: nn.Module, position_ids: Tensor | None) -> CacheLayer:
        """The same, after a check that the positions are the step's."""
        layer = CacheLayer(self, module)
        layer.check_positions(position_ids)
        return layer

    def run_state(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step's tokens through a module that keeps a state, which is read from and written to the pool."""
        places, first = self.mixers[module], len(self.layer_pages)
        number = places[0] if len(places) == 1 else self.next_of(places, first)
        self.attended[first + number] += 1
        step = self.step_on(self._mixers_elsewhere[number])
        return run_step(module, args, kwargs, step, self.pool.states, number)

    def next_of(self, places: Sequence[int], first: int = 0) -> int:
        """The place of a module's next call in the step: that of the first layer which has not run; else the last."""
        return next((place for place in places if not self.attended[first + place]), places[-1])

    def end(self) -> None:
        """Finish the step, and check that it went through every layer.

        Raises:
            ValueError: no step is in progress; or layers on another device got other positions.
            IncompleteStep: a layer did not run exactly once, so the KV of this step is not complete.
        """
        if self._step is None:
            raise ValueError("StepCache.end: no step in progress; call cache.begin(step) first")
        others = self._others
        self.abandon()
        if others is not None:
            others.check()
        missed = [layer for layer, calls in enumerate(self.attended) if calls != 1]
        if missed:
            raise IncompleteStep(
                f"StepCache.end: layers {missed} of {len(self.attended)} did not run over the tree exactly once. "
                "Something calls their forward behind the patch (a wrapper, a compiled copy), or the model skips "
                "layers: patch the model again after whatever wrapped it"
            )

    def abandon(self, step: Step | None = None) -> None:
        """Drop the step in progress without a check, after an error; with ``step``, only if that is in progress."""
        if step is None or self._step is step:
            self._step = self.given_positions = self._others = None
            self.blocks, self.equal_blocks, self.masked_plans, self.turned = {}, {}, {}, {}

    def __repr__(self) -> str:
        state = "between steps" if self._step is None else f"in a step of {self._step.tokens.shape[0]} tokens"
        return f"StepCache({self.pool.spec}, {state})"


def _refuse(cache: StepCache, *args: Any, method: str, **kwargs: Any) -> NoReturn:
    raise TypeError(f"StepCache.{method}: the tree decides whose KV is kept; use PrefixTree's fork, trim and release")


# Methods that would change which KV is retained.  The base class, which sees no layers, would silently do nothing.
for _method in ("reorder_cache", "crop", "reset", "batch_repeat_interleave", "batch_select_indices"):
    setattr(StepCache, _method, partialmethod(_refuse, method=_method))


class CacheLayer(PlainLayer):
    """One layer's part of a :class:`StepCache`, for the length of one forward call.

    The original attention ``forward`` receives it as its cache and calls :meth:`update`; then our attention function
    calls :meth:`attend`.  It exists during the call only, so a failed call leaves nothing behind.
    """

    step: Step

    def __init__(self, cache: StepCache, module: nn.Module) -> None:
        number = layer_number(module)
        if (places := cache.places.get(number)) is None:
            raise ValueError(
                f"StepCache: layer {number} of the model asked for KV, but the pool was made for "
                f"{len(cache.layer_pages)} layers; make it with KVPool(kv_spec(model), ...)"
            )
        self.place = places[0] if len(places) == 1 else cache.next_of(places)
        own = cache.layer_pages[self.place]
        super().__init__(own, cache.step if own.elsewhere is None else cache.step_on(own.elsewhere))
        self.cache, self.module, self.index = cache, module, own.index
        self.blocks, self.equal_blocks = cache.blocks, cache.equal_blocks
        self.appended = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The same, after a check of the layer, the shapes and the dtypes."""
        if layer_idx != self.index or self.appended or self.cache.attended[self.place]:
            raise IncompleteStep(
                f"StepCache: layer {self.index} wrote KV twice in one step, or wrote for layer {layer_idx}; each "
                "attention layer must run once a step, on KV of its own"
            )
        made, dtype = (self._rounded(key_states), self._rounded(value_states)), self.cache.pool.spec.compute_dtype
        tokens = self.step.slots.shape[0]
        for name, states, (heads, size) in zip(("keys", "values"), made, self.own.heads, strict=True):
            expected = (1, heads, tokens, size)
            if states.shape != expected or states.dtype != dtype:
                raise ValueError(
                    f"StepCache: layer {self.index} made {name} of shape {tuple(states.shape)} {states.dtype}, "
                    f"but the step and the pool take {expected} {dtype} (batch, heads, tokens, head_dim); "
                    "make the pool with KVPool(kv_spec(model), ...) and call model(**cache.inputs())"
                )
        super().update(*made, layer_idx)
        self.appended = True
        # If the layer's own code expands K and V from these, attention expands them for all tokens: one is enough here.
        return (made[0][:, :, :1], made[1][:, :, :1]) if self.own.kind.expands else made

    def _rounded(self, states: Tensor) -> Tensor:
        """Under autocast, round to the dtype that attention computes in, as autocast does in attention's products."""
        return (
            states.to(self.cache.pool.spec.compute_dtype) if torch.is_autocast_enabled(states.device.type) else states
        )

    def attend(
        self,
        query: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Tensor | None,
        bias: Bias | None = None,
    ) -> Tensor:
        """The same, after a check that the layer has appended."""
        reads = self.own.kind.reads
        if not (self.appended if reads is None else self.cache.attended[reads]):
            raise IncompleteStep(
                f"StepCache: layer {self.index} attends before {'it' if reads is None else f'layer {reads}'} has "
                "written KV in this step"
            )
        query = self._rounded(query)
        if self.own.plain:
            together = sinks is not None and not self.apart(sinks)
            (variant,) = self.variants(cap, together, None if bias is None else bias())
            out = self.finished(self.attend_plain(query, scale, variant, sinks))
        else:
            out = super().attend(query, scale, window, cap, sinks, bias)
        self.cache.attended[self.place] += 1
        return out

    @property
    def plan_under_mask(self) -> list[Tensor]:
        """The same, see :func:`masked_plan`."""
        plan = self.plan
        return masked_plan(self.step, plan, self.own, self.cache.masked_plans) if self.own.masked else plan

    def turned(self, frequencies: Tensor, target: Tensor) -> Angles:
        """The same, made once in a step for all layers with the same rotation."""
        asked, made = (self.own.kind.rotation, self.own.kind.variant, self.own.elsewhere), self.cache.turned
        if asked not in made:
            made[asked] = super().turned(frequencies, target)
        return made[asked]

    def run_state(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As :meth:`StepCache.run_state`, for a module inside an attention module."""
        return self.cache.run_state(module, args, kwargs)

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Raise ValueError if the model passes other positions than the step's, for which it made its embeddings."""
        given = self.cache.given_positions
        if position_ids is None or position_ids is given or (given is not None and _repeats(position_ids, given)):
            return
        positions = self.step.positions  # several rows of positions are for images, which a step has none of
        fits, elsewhere = position_ids.shape[-1:] == positions.shape, self.own.elsewhere
        if fits and elsewhere is not None:
            return self.cache.others().compare_later(elsewhere, position_ids)
        if not fits or not bool((position_ids == positions).all()):
            raise ValueError(OTHER_POSITIONS)


def _repeats(position_ids: Tensor, given: Tensor) -> bool:
    """Whether positions are a view that repeats the ``[1, T]`` positions ``given``, found without reading values."""
    here = position_ids.data_ptr() == given.data_ptr() and position_ids.dtype == given.dtype
    same = here and position_ids.shape[-1:] == given.shape[-1:] and position_ids.stride(-1) == given.stride(-1)
    sizes = zip(position_ids.shape[:-1], position_ids.stride()[:-1], strict=True)
    return same and all(size == 1 or not stride for size, stride in sizes)
