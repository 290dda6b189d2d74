"""A cache that poses as one that holds a text, and records what each attention layer of a model does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from prefixkit.attention.visible import Visible
from prefixkit.kv.layer_kinds import CachedTensor, LayerKind
from prefixkit.models.attention_class import SCALES, layer_number, original_class
from prefixkit.models.indexing.indexers import IndexerCall
from prefixkit.models.indexing.text_positions import text_positions
from prefixkit.models.latents.latent_maps import EXPAND, is_affine
from prefixkit.models.layered_cache import Bias, LayeredCache
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.probe.bias import bias_fault, bias_of_rows
from prefixkit.models.probe.compressor import ProbedCompressor
from prefixkit.models.probe.eager_function import eager_error, smaller
from prefixkit.models.probe.indexer import ProbedIndexer, Selection
from prefixkit.models.probe.mask import UnknownMask, visible_by
from prefixkit.models.probe.measured import ORDER, ROWS, TOKENS, are_same, close
from prefixkit.models.probe.probed_states import ProbedStates
from prefixkit.models.probe.stored_layers import remedy_of_loops


class ProbeCache(LayeredCache):
    """Poses as a cache, and records what each layer, an attention module by name, does.

    Args:
        length: Tokens that it claims to hold, although it holds none; None: it poses as the cache of a step over a
            tree, and layers must get that step's mask.
        shapes_only: Tensors have no values to compare.
        mixers: Modules that keep a state, by name.
        offsets: Whether a step over a tree reports a number of cached tokens per row that yields the row's position.
    """

    def __init__(
        self,
        layers: dict[str, nn.Module],
        length: int | None,
        shapes_only: bool = False,
        mixers: dict[str, nn.Module] | None = None,
        offsets: bool = False,
    ) -> None:
        super().__init__(len(layers))
        self.states = ProbedStates(mixers or {})
        self.length, self.shapes_only, self._offsets = length, shapes_only, offsets
        self.asks_positions = self.measured = False  # whether the model asks for texts' positions or lengths
        self.is_initialized = length != 0
        self.modules = {module: name for name, module in layers.items()}
        # Per layer of the cache, as they run; sort() puts the layers in order.
        self.kinds, self.selections = list[LayerKind](), list[Selection]()  # of all layers, and of all indexers
        self.cached: list[tuple[Tensor, ...]] = []  # empty if the layer attends over another's KV
        self.rows: list[Tensor] = []  # [ROWS, query, keys and values of a row]
        self.ran: list[tuple[int, nn.Module]] = []  # the layer, and the module that computes it
        self.visible: dict[tuple[Any, int | None], Visible] = {}  # by mask (layers share masks) and window

    def layer(self, module: nn.Module, position_ids: Tensor | None) -> ProbedLayer:
        return ProbedLayer(self, module)

    def run_state(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.states.measure(module, args, kwargs, check=self.length is None)  # in a step over a tree alone

    def sort(self) -> None:
        """Put the layers in the order of their numbers; a looped model runs them in another."""
        order = sorted(range(len(self.ran)), key=lambda place: self.ran[place][0])
        after = {before: place for place, before in enumerate(order)}
        read = [kind if kind.reads is None else replace(kind, reads=after[kind.reads]) for kind in self.kinds]
        self.kinds, self.cached = [read[at] for at in order], [self.cached[at] for at in order]
        self.rows, self.ran = [self.rows[at] for at in order], [self.ran[at] for at in order]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the attention layers if other layers lie between them; else empty."""
        ended = len({module for _, module in self.ran}) == len(self.modules)
        found = tuple([layer for layer, _ in self.ran] if ended else map(layer_number, self.modules))
        return () if found == tuple(range(len(found))) else found

    @property
    def computed_by(self) -> tuple[int, ...]:
        """The number of the module that computes each attention layer if one computes several; else empty."""
        found = tuple(layer_number(module) for _, module in self.ran)
        return found if len(set(found)) < len(found) else ()

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        self.measured = True
        return self.offsets if self.length is None else self.length

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """0 for a long text if the model counts positions from it: few position tables have as many entries."""
        if not self._offsets:
            return self.length or 0
        return self.offsets if self.length is None else 0

    @property
    def offsets(self) -> Tensor:
        """``[ROWS]`` the number added to the index of each row of a step to give its position."""
        device = next(next(iter(self.states.names or self.modules)).parameters()).device
        return torch.tensor(ORDER, device=device) - torch.arange(ROWS, device=device)

    def text_positions(self) -> Tensor:
        """The positions of a few tokens: an indexer is measured with arbitrary keys, whose positions do not matter."""
        self.asks_positions = True
        return text_positions(ROWS, self.offsets.device)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        self.measured = True
        new = len(query_length) if isinstance(query_length, Tensor) else query_length  # positions, before 5.20
        by_rows = self.length is not None or self.shapes_only  # a model without values makes a mask of its rows
        return ((self.length or 0) + new if by_rows else TOKENS), 0


class ProbedLayer:
    """One layer's part of a :class:`ProbeCache`."""

    def __init__(self, cache: ProbeCache, module: nn.Module) -> None:
        self._cache, self._module, self._layer = cache, module, layer_number(module)
        self._cached: tuple[Tensor, ...] = ()
        self._indexed: Selection | None = None  # the selection of the layer's own indexer
        self._attended: Selection | None = None  # the selection that the layer attends to
        self._own_mask: Tensor | None = None  # replaces the mask that the layer makes of that selection
        self._measures = False  # whether the layer asks for the lengths of texts
        self._bias: Tensor | None = None  # added to the layer's scores
        self._compressed: ProbedCompressor | None = None  # makes the entries that the layer attends to

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        before = [layer for layer, module in self._cache.ran if module is self._module]
        if self._cached or (layer_idx < before[-1] if before else layer_idx != self._layer):
            self._refuse(f"caches KV out of order, of layer {layer_idx} after or in place of layer {self._layer}")
        if others := [self._cache.modules[module] for layer, module in self._cache.ran if layer == layer_idx]:
            self._refuse(f"caches KV of layer {layer_idx} after {others[0]} has cached it in the same pass")
        self._layer = layer_idx
        for states in (key_states, value_states):
            if states.ndim != 4 or states.shape[0] != 1 or states.shape[2] != ROWS:
                self._refuse(
                    f"caches a tensor of shape {tuple(states.shape)} for {ROWS} tokens; a pool holds tensors of "
                    "[1, heads, tokens, head_dim]"
                )
        self._cached = key_states, value_states
        return key_states, value_states

    def run_state(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._cache.run_state(module, args, kwargs)

    def select(self, indexer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self._indexed is not None:
            self._refuse("runs its indexer twice")
        cache = self._cache
        call = IndexerCall(indexer, args, kwargs, self, ROWS, ROWS)
        try:
            self._indexed = ProbedIndexer(call, cache.length, not cache.shapes_only).selection()
        except ValueError as error:
            self._refuse(f"cannot select tokens in a tree: {error}")
        cache.selections.append(self._indexed)
        if not self._indexed.is_mask:
            return self._indexed.found
        self._attended = self._indexed
        return self._indexed.mask(cache.length)

    def set_selected(self, indices: Tensor) -> None:
        found = [each for each in self._cache.selections if self._same((indices,), (each.found,))]
        if not found:
            self._refuse("attends to tokens that no indexer has selected")
        self._attended = found[-1] if self._indexed is None else self._indexed

    def mask_of(self, own: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self.set_selected(kwargs["topk_indices"] if "topk_indices" in kwargs else args[0])
        assert self._attended is not None, "taken"
        mask = own(*args, **kwargs)
        at = torch.arange(ROWS, device=mask.device)
        shown = mask == 0 if mask.is_floating_point() else mask
        if mask.shape[-2:] != (ROWS, ROWS) or not torch.equal(shown[0, 0] & (at <= at[:, None]), self._attended.shown):
            self._refuse("makes another mask than that of the tokens that are selected")
        self._own_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=mask.device)
        return self._own_mask

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        self._measures = True
        return self._cache.get_mask_sizes(query_length, layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        self._measures = True
        return self._cache.get_query_offset(layer_idx)

    def add(self, bias: Tensor) -> None:
        self._bias = bias

    def compress(self, compressor: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if self._compressed is not None:
            self._refuse("runs its compressor twice")
        call = IndexerCall(compressor, args, kwargs, self, ROWS, 0)
        try:
            self._compressed = ProbedCompressor(call, check=self._cache.length is None and not self._cache.shapes_only)
        except ValueError as error:
            self._refuse(f"cannot compress tokens in a tree: {error}")
        return self._compressed.stand_in

    def check(self, key: Tensor, value: Tensor, attention_mask: Any) -> None:
        self._mask, self._kv, self._expands, self._reads = attention_mask, (key, value), False, None
        if not self._cached:
            found = [index for index, cached in enumerate(self._cache.cached) if are_same(cached, (key, value))]
            if not found:
                others = [cached for cached in self._cache.cached if cached and cached[0].device != key.device]
                where = f" on {key.device}; layers that share KV must lie on one device" if others else ""
                where += remedy_of_loops(self._module)
                self._refuse(f"attends over KV that neither it nor another layer has cached{where}")
            self._reads = found[0]
        elif not self._same((key, value), self._cached):
            self._expands = self._expanded(key, value)

    def _same(self, given: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
        return all(
            one is other
            or (one.shape == other.shape and (self._cache.shapes_only or bool((one == other.to(one.device)).all())))
            for one, other in zip(given, expected, strict=True)
        )

    def _expanded(self, key: Tensor, value: Tensor) -> bool:
        """True if the layer's ``expand_kv`` makes K and V of what it caches, token by token; else refuse the layer."""
        expand = getattr(self._module, EXPAND, None)
        if expand is None or not self._same((key, value), expand(*self._cached)):
            shapes = [[tuple(states.shape) for states in pair] for pair in ((key, value), self._cached)]
            self._refuse("attends over other keys and values, {}, than it caches, {}".format(*shapes))
        if not self._cache.shapes_only:
            some = expand(*(states[:, :, 1:3] for states in self._cached))
            for part, whole in zip(some, (key, value), strict=True):
                if not close(part, whole[:, :, 1:3], whole.dtype):
                    self._refuse("makes keys and values of one token of what it caches of others")
        return True

    def attend(
        self,
        query: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Tensor | None,
        bias: Bias | None = None,
    ) -> Tensor:
        (k, v), told = self._kv, self._visible(window)
        if self._indexed is not None and self._attended is None:
            self._refuse("has an indexer, but attends to all tokens")
        fault = bias_fault(self._bias, self._measures, self._cache.measured, self._cache.length, cap, sinks)
        if fault is not None:
            self._refuse(fault)
        own = self._module.__dict__
        dtype = smaller(*(self._cached or self._kv))
        scales = own.get(SCALES) and not own.get("use_rope")
        kind = LayerKind(
            heads=query.shape[1],
            kv_heads=k.shape[1],
            k_dim=k.shape[3],
            v_dim=v.shape[3],
            cached=(*(CachedTensor(states.shape[1], states.shape[3]) for states in self._cached), *self._others(dtype)),
            dtype=dtype,
            device=k.device,
            visible=told,
            expands=self._expands,
            absorbs=told == Visible() and all(of is None for of in (cap, sinks, bias)) and self._absorbs(query, k),
            reads=self._reads,
            temperature=(float(own["floor_scale"]), float(own["attn_scale"])) if scales else None,
            selects=None if self._attended is None else self._attended.most,
            index_dtype=None if self._indexed is None else self._indexed.keys.dtype,
            selection_is_mask=self._indexed is not None and self._indexed.is_mask,
            biased=self._bias is not None,
            compressed=() if self._compressed is None else self._compressed.kinds,
        )
        if self._reads is not None and any(layer == self._layer for layer, _ in self._cache.ran):
            self._refuse("runs several times in one pass, and again without caching KV of its own")
        self._cache.ran.append((self._layer, self._module))
        self._cache.kinds.append(kind)
        self._cache.cached.append(self._cached)
        if self._cache.length is None and not self._cache.shapes_only:
            if not isinstance(self._mask, Tensor) or self._mask.numel():
                self._refuse("gets another mask than the model was given, so it is not known what is hidden from it")
            added = None if self._bias is None else bias_of_rows(self._bias, self._cache.length)
            if (error := eager_error(self._module, (query, k, v), scale, window, cap, sinks, added)) is not None:
                self._refuse(
                    "attends in a way of its own: its eager function and softmax(scale q k) v, with the window, cap, "
                    f"sinks and bias that it is told of, differ by {error:.1e}"
                )
        rows = [of[0].transpose(0, 1).flatten(1).float() for of in (query, k, v)]
        if self._indexed is not None:
            rows.append(self._indexed.keys[0].float())
        if self._compressed is not None:
            rows.append(self._compressed.rows)
        if self._bias is not None:
            rows.append(bias_of_rows(self._bias, self._cache.length)[0].transpose(0, 1)[..., :-1].flatten(1).float())
        if sinks is not None and sinks.ndim == 2:
            rows.append(sinks.float())
        self._cache.rows.append(torch.cat(rows, 1))
        return v.repeat_interleave(kind.heads // kind.kv_heads, 1).transpose(1, 2).to(query.dtype).contiguous()

    def _absorbs(self, query: Tensor, key: Tensor) -> bool:
        """Whether queries may attend over the cached tensors, from which the layer makes a head of K per query head."""
        others = self._attended, self._bias, self._compressed
        known = self._expands and not self._cache.shapes_only and all(other is None for other in others)
        return known and key.shape[1] == query.shape[1] and is_affine(self._module, *self._cached)

    def _visible(self, window: int | None) -> Visible:
        """The range that queries see: read from the mask, or without one from the attention function's window."""
        length, mask = self._cache.length, self._mask
        if length is None:
            return Visible(window)
        if self._own_mask is not None:
            if mask is not self._own_mask:
                self._refuse("gets another mask than that of the tokens that are selected")
            return Visible(window)
        if self._indexed is not None and self._indexed.is_mask:
            mask = self._indexed.without(mask)
            if mask is None:
                self._refuse("attends to tokens that its indexer has not selected")
        known = self._cache.visible
        try:
            if (mask, window) not in known:
                known[mask, window] = visible_by(mask, length, ROWS, window)
            return known[mask, window]
        except UnknownMask as error:
            self._refuse(str(error))

    def _others(self, dtype: torch.dtype) -> list[CachedTensor]:
        """What the layer caches in addition: index keys as numbers of the pool's dtype, or its compressors' tensors."""
        if self._compressed is not None:
            if self._compressed.dtype != dtype or self._indexed is not None:
                self._refuse(
                    f"compresses vectors of {self._compressed.dtype} beside K of {dtype}, or has an indexer too"
                )
            return [CachedTensor(1, one.kv + one.gate) for one in self._compressed.kinds]
        if self._indexed is None:
            return []
        keys = self._indexed.keys
        size = keys.shape[2] * keys.dtype.itemsize
        if size % dtype.itemsize:
            self._refuse(f"has index keys of {size} bytes, which are no whole numbers of {dtype}")
        return [CachedTensor(1, size // dtype.itemsize)]

    def _refuse(self, what: str) -> NoReturn:
        name = self._cache.modules[self._module]
        raise UnsupportedModel(f"{name} ({original_class(self._module).__name__}) {what}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"asks its cache for {name!r}, which a tree does not have for a step of many sequences")
