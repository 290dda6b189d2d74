"""The KV of a padded batch as a prefix tree: what ``model.generate()`` takes as its cache."""

from __future__ import annotations

import copy
import functools
import logging
import sys
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache

from prefixkit.kv.limits import DoesNotFit
from prefixkit.models.attention_class import accepts_trees, cached_by
from prefixkit.models.facts import ModelFacts, facts_of
from prefixkit.models.families import attention_layers, pretrained_model
from prefixkit.models.generate.fallback_method import or_of_fallback
from prefixkit.models.generate.in_use import InUse
from prefixkit.models.generate.layer_view import LayerView
from prefixkit.models.generate.row_steps import RowSteps
from prefixkit.models.generate.unplaced import compute_again
from prefixkit.models.indexing.index_copies import copy_index_keys
from prefixkit.models.model_errors import NotPatched, UnsupportedModel
from prefixkit.models.states.taken_cache import empty_cache
from prefixkit.torch_private import outside_modes
from prefixkit.tree.arrays import Ints
from prefixkit.tree.pages import OutOfPages, check_page_size

log = logging.getLogger("prefixkit")
_ANEW = "the model has changed since its cache was made; the cache is computed anew by it as it is"


class TreeCache(DynamicCache):
    """A cache for ``generate`` over a prefix tree: tokens that rows share are computed, stored and read once.

    ``model.generate(..., cache=prefixkit.TreeCache(model))`` runs on the tree, and so does a call of the model; before
    transformers 5.24 the keyword is ``past_key_values``.  :func:`prefixkit.patch` says when ``generate`` makes one by
    itself.  Rows are left-padded, as for any batch of ``generate``; shared tokens are found token by token.  No KV is
    copied when beams are reordered or rows are repeated.  The cache can be cropped, continued and returned like another
    cache.  There is no backward.

    From the first call until the cache is reset or deleted, the KV is held in the model's KV store, which sessions use
    too; the store is made, or copied to a larger one, where needed.  While another call uses that store, the cache has
    a store of its own.

    Args:
        model: The model, patched by :func:`prefixkit.patch`.
        page_size: Tokens per KV page, 1 to 128.

    Raises:
        NotPatched: the model is not patched.
        UnsupportedModel: ``model`` contains no transformers model.
        ValueError: ``page_size`` is out of range.
    """

    def __init__(self, model: Any, *, page_size: int = 16) -> None:
        super().__init__()
        check_page_size(page_size)
        self.model, self.page_size = pretrained_model(model), page_size
        if not accepts_trees(self.model):
            raise NotPatched(
                f"TreeCache: {type(self.model).__name__} is not patched; call prefixkit.patch(model) first"
            )
        self.fallback: Cache | None = None  # the cache to use if rows cannot run on a tree
        self.fell_back = False  # whether it has fallen back
        self.always = True  # whether to use a tree wherever possible, not only where it pays
        self.fork = False  # whether rows fork as beams do
        self.unplaced = False  # whether rows are padded, and the model counts their positions
        self.final_length = 0  # the length that rows are expected to reach
        self._steps: RowSteps | None = None
        self.in_use = InUse()

    # -- what generate() asks ------------------------------------------------------------------------------------------

    @or_of_fallback
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each row, padding included."""
        return 0 if self._steps is None else self._steps.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, as transformers writes "no maximum"."""
        return -1

    @property
    def padding(self) -> NDArray[np.int64]:
        """``[rows]`` padding before each row."""
        return np.empty(0, np.int64) if self._steps is None else self._steps.rows.pad

    @property
    def repeats(self) -> bool:
        """Whether the next decode step repeats the last one."""
        return self._steps is not None and self._steps.repeats

    def flush(self) -> None:
        """Insert the tokens of repeated steps into the tree, before another call continues the cache."""
        with self.in_use:
            if self._steps is not None:
                self._steps.flushed()
                if not self._steps.is_current:
                    self._steps.mark_stale()

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is held; tokens that rows share count once."""
        return 0 if self._steps is None else int(self._steps.flushed().tree.snapshot().length.sum())

    @property
    def steps(self) -> RowSteps:
        """The cache's rows, after :meth:`start`."""
        assert self._steps is not None
        return self._steps

    @or_of_fallback
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was; nothing is copied."""
        order = [int(row) for row in beam_idx.tolist()]
        with self.in_use:
            if self._steps is not None and order != list(range(len(self.padding))):
                self._steps.flushed().select(order)

    @or_of_fallback
    def batch_select_indices(self, indices: Tensor) -> None:
        """Select these rows, in this order."""
        self.reorder_cache(torch.arange(len(self.padding))[indices.cpu()])

    @or_of_fallback
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row; nothing is copied."""
        self.reorder_cache(torch.arange(len(self.padding)).repeat_interleave(repeats))

    @or_of_fallback
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of each row, or all; ValueError for a positive number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"TreeCache.crop: got {tokens_to_remove} for {self.get_seq_length()} tokens; use a negative number, of "
                "the tokens that are to be removed"
            )
        if tokens_to_remove and self._steps is not None:
            with self.in_use:
                length = self.get_seq_length() + int(tokens_to_remove)  # transformers sometimes passes a tensor
                self._steps.trim(max(0, length))

    def reset(self) -> None:
        """Drop all tokens and return the KV store."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.end()

    def abandon(self) -> None:
        """Reset after an interrupt, which may have left the tree half changed: no KV is retained."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.abandon()

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeCache:
        """A cache of the same model with a copy of the KV: for scripts that copy a prompt's cache for each use."""
        other = TreeCache(self.model, page_size=self.page_size)
        other.fallback, other.fell_back = copy.deepcopy(self.fallback, memo), self.fell_back
        other.always, other.fork, other.final_length = self.always, self.fork, self.final_length
        other.unplaced = self.unplaced
        if self._steps is not None:
            other._start_copy_of(self._steps)
        return other

    def vacate(self) -> bool:
        """Move the KV to another KV store, because a call asks for the present one; returns False if it has to stay."""
        with self.in_use.unless() as free:
            if not free or self._steps is None or self._steps.loops.changed:
                return False
            with suppress(DoesNotFit):
                self.move()
                log.info("a TreeCache of %d tokens has moved to another KV store", self.get_seq_length())
                return True
        return False

    def move(self) -> None:
        """Move the rows to another KV store, and compute KV of other loops anew; if it raises, they have not moved."""
        before, self._steps = self.steps, None
        try:
            self._start_copy_of(before)
        except BaseException:
            self.reset()
            self._steps = before
            raise
        before.end()

    def _start_copy_of(self, steps: RowSteps) -> None:
        rows = steps.flushed()
        copy = self.start(facts_of(self.model), rows.tokens(), rows.pad, rows.text)
        if steps.loops.changed:
            log.warning(_ANEW)
            copy.compute(1)
            return
        steps.copy_kv(copy)
        if not steps.is_current:
            copy.mark_stale()

    def fall_back(self) -> Cache:
        """Fall back to a cache of transformers, which gets a copy of the KV."""
        if self.fallback is None:
            self.fallback = empty_cache(self.model)
        if not self.fell_back:
            self.copy_to(self.fallback)
            self.reset()
            self.fell_back = True
        return self.fallback

    def of_another_kind(self) -> bool:
        """Whether the model now computes KV that does not suit the pool."""
        try:
            return self._steps is not None and self._steps.store.pool.spec != facts_of(self.model).spec
        except UnsupportedModel:
            return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a cache of transformers with the same KV instead: a tree belongs to a model of this process."""
        if self.fell_back:
            return copy.copy, (self.fallback,)
        self.copy_to(cache := empty_cache(self.model))
        return copy.copy, (cache,)

    def __del__(self) -> None:
        if "_steps" in self.__dict__ and not sys.is_finalizing():
            with outside_modes():
                self.reset()

    def activate_past_recording(self) -> None:
        """Forward the call to the fallback; tokens computed on a tree can always be cropped."""
        if self.fallback is not None:
            self.fallback.activate_past_recording()  # type: ignore[no-untyped-call]

    # -- what a forward pass does --------------------------------------------------------------------------------------

    def start(self, facts: ModelFacts, tokens: Ints, pad: NDArray[np.int64], text: int | None = None) -> RowSteps:
        """Start the rows of a batch, ``tokens [rows, length]``: the first ``pad [rows]`` tokens are padding, and the
        first ``text`` tokens are a text whose tokens may see later ones (None: all).

        Nothing is computed yet.  Raises DoesNotFit if there is no memory for the rows' KV; the cache is then empty.
        """
        self.reset()
        new = max(self.final_length - tokens.shape[1], 0)
        self._steps = RowSteps(facts, self, tokens, pad, new, self.page_size, fork=self.fork, text=text)
        return self._steps

    def go_on(self, tokens: Tensor, count: int) -> Tensor:
        """Append ``[rows, new]`` tokens to rows, compute them, and return the last logits, ``[rows, count, vocab]``."""
        assert self._steps is not None, "started before"
        steps, before = self._steps, self.get_seq_length()
        try:
            if tokens.shape[1] == 1:
                return steps.decode(tokens[:, 0], self.final_length, self.fork)[:, None]
            steps.extend(tokens)
            return steps.compute(count)
        except KeyboardInterrupt:
            self.abandon()
            raise
        except BaseException:
            with suppress(RuntimeError, OutOfPages):  # if the device has failed
                steps.flushed().trim(min(before, self.get_seq_length()))
            raise

    def copy_to(self, cache: Cache) -> None:
        """Copy the KV of all rows to an empty cache of transformers; the KV of padding is undefined."""
        if self._computes_again and self._steps is not None:
            if not self._steps.is_current:
                log.warning(_ANEW)
            with self.in_use:
                rows, device = self._steps.flushed(), self._steps.store.pool.spec.device
                return compute_again(self.model, rows, cache, device, placed=not self.unplaced)
        modules = attention_layers(self.model).values() if len(self) else ()
        for layer, module in enumerate(list(modules)[: len(self)]):
            cache.update(*cached_by(module, *self.kv(layer)), layer)
        if self._steps is not None:
            with self.in_use:
                pool, rows = self._steps.store.pool, self._steps.flushed()
                copy_index_keys(self._steps.index_dtypes, pool, rows, cache)

    @property
    def _computes_again(self) -> bool:
        """Whether a cache of transformers with the same rows must be computed anew, because the pool lacks its data."""
        return self.unplaced or (self._steps is not None and (self._steps.keeps_more or self._steps.loops.changed))

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """``[rows, kv_heads, length, head_dim]`` copies of a layer's keys and values, undefined in place of padding."""
        if self._steps is None:
            raise ValueError("TreeCache: it is empty, so no layer has keys or values")
        if self._computes_again:
            self.copy_to(cache := empty_cache(self.model))
            whole: Any = cache.layers[layer]
            return whole.keys, whole.values
        with self.in_use:
            pool, slots = self._steps.store.pool, self._steps.flushed().slots()
            tensors = pool.pages(layer)[:2]
            pages, offsets = (torch.from_numpy(of).to(tensors[0].device) for of in np.divmod(slots, self.page_size))
            rows = (of[pages, offsets].transpose(1, 2) for of in tensors)
            k, v = (of.to(pool.spec.compute_dtype).contiguous() for of in rows)
        return k, v

    # -- what a cache says of itself -----------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotPatched: only a model that is not patched, or a model other than the cache's, calls this."""
        raise NotPatched(
            f"layer {layer_idx} was given a TreeCache of {type(self.model).__name__}, but the model that it belongs to "
            "does not take one: call prefixkit.patch(model), and pass the cache to the model itself"
        )

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotPatched as :meth:`update`: a model that is not patched calls this method first."""
        self.update(torch.empty(0), torch.empty(0), 0)

    @or_of_fallback
    def __len__(self) -> int:
        return 0 if self._steps is None else len(self._steps.store.pool.spec.layers)

    @property
    def layers(self) -> list[Any]:
        """Read-only views of the layers' KV, as other caches present it."""
        if self.fallback is not None and self.fell_back:
            return self.fallback.layers
        return [LayerView(self.get_seq_length, functools.partial(self.kv, layer)) for layer in range(len(self))]

    @layers.setter
    def layers(self, none: list[Any]) -> None:
        """Ignore the layers that the base class would store."""

    def __repr__(self) -> str:
        return f"TreeCache({len(self.padding)} rows of {self.get_seq_length()} tokens)"

    is_initialized = is_croppable = True
    is_compileable = False

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first call."""
        return -1 if self._steps is None else len(self.padding)

    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer: attention variants apply windows, and every layer retains all its KV."""
        return [False] * len(self)

    is_linear = is_dummy = is_sliding
