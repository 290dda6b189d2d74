"""A cache that stands for a text, and notes what each attention layer of a model does with it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from prefixkit.attention.visible import Visible
from prefixkit.kv.layer_kinds import CachedTensor, LayerKind
from prefixkit.kv.state_pool import States, StateTensor
from prefixkit.models.attention_class import SCALES, layer_number, original_class
from prefixkit.models.indexing.plain_layer import EXPAND
from prefixkit.models.layer import Bias, LayeredCache
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.own_attention.known import own_code
from prefixkit.models.probe.indexer import ProbedIndexer, Selection
from prefixkit.models.probe.mask import UnknownMask, chunk_of, window_of
from prefixkit.models.states.going_on import measure_state

ROWS = 4  # tokens of a pass; the last is the first once more, at its position


@dataclass(frozen=True)
class Probed:
    """What a model's attention layers do.

    Attributes:
        layers: The kind of each.
        counts_from_zero: Keys are the same without position_ids as with those that count from 0.
        numbers: Of these layers in the model, where others lie between them.
        states: Of each module that keeps a state, what it keeps of a sequence.
    """

    layers: tuple[LayerKind, ...]
    counts_from_zero: bool = True
    numbers: tuple[int, ...] = ()
    states: States = ()


class Enough(Exception):
    """The first layer was seen."""


class ProbeCache(LayeredCache):
    """Stands for a cache, and notes what each layer, an attention module by name, does.

    Args:
        length: Tokens that it claims to hold, of which there are none; None: it stands for a step over a tree, whose
            mask must arrive.
        shapes_only: Tensors have no values to compare; the pass ends at the first attention, unless layers keep states.
        mixers: Modules that keep a state, by name.
    """

    def __init__(
        self,
        layers: dict[str, nn.Module],
        length: int | None,
        shapes_only: bool = False,
        mixers: dict[str, nn.Module] | None = None,
    ) -> None:
        super().__init__(len(layers))
        self.mixers = {} if mixers is None else {module: name for name, module in mixers.items()}
        self.states: dict[nn.Module, tuple[StateTensor, ...]] = {}
        self._numbers = tuple(map(layer_number, layers.values()))
        self.length, self.shapes_only = length, shapes_only
        self.is_initialized = length != 0
        self.names = list(layers)
        self.kinds: list[LayerKind] = []
        self.cached: list[tuple[Tensor, ...]] = []  # of each layer; none where it attends over another's
        self.selections: list[Selection] = []  # of all indexers
        self.rows: list[Tensor] = []  # of each layer: [ROWS, what a row's query, keys and values are]

    def layer(self, module: nn.Module, position_ids: Tensor | None) -> ProbedLayer:
        return ProbedLayer(self, module)

    def run_state(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Each row is a text of its own for modules that keep a state, which are measured apart."""
        name = self.mixers[module]

        def refuse(what: str) -> NoReturn:
            raise UnsupportedModel(f"{name} ({original_class(module).__name__}) {what}")

        if module in self.states:
            refuse("runs twice in one pass, and a tree holds one state of each module")
        made, self.states[module] = measure_state(module, args, kwargs, ROWS, refuse)
        return made

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those of the layers in the model, where others lie between them."""
        return () if self._numbers == tuple(range(len(self._numbers))) else self._numbers

    @property
    def found_states(self) -> States:
        """What each module that keeps a state keeps, in their order."""
        return tuple(self.states.get(module, ()) for module in self.mixers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length or 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        new = len(query_length) if isinstance(query_length, Tensor) else query_length  # positions, before 5.20
        return (self.length or 0) + new, 0


class ProbedLayer:
    """One layer's part of a :class:`ProbeCache`."""

    def __init__(self, cache: ProbeCache, module: nn.Module) -> None:
        self._cache, self._module = cache, module
        self._cached: tuple[Tensor, ...] = ()
        self._indexed: Selection | None = None  # by the layer's own indexer
        self._attended: Selection | None = None  # to which it attends

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        numbers, at = self._cache._numbers, len(self._cache.kinds)
        if self._cached or layer_idx != (numbers[at] if at < len(numbers) else -1):
            self._refuse(f"caches KV out of order, of layer {layer_idx} after {at} layers")
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
        try:
            self._indexed = ProbedIndexer(
                indexer, args, kwargs, self, ROWS, cache.length, not cache.shapes_only
            ).selection()
        except ValueError as error:
            self._refuse(f"cannot select tokens in a tree: {error}")
        cache.selections.append(self._indexed)
        return self._indexed.indices

    def attend_selected(
        self, indices: Tensor, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        found = [each for each in self._cache.selections if self._same((indices,), (each.indices,))]
        if not found:
            self._refuse("attends to tokens that no indexer has selected")
        self._attended = found[-1] if self._indexed is None else self._indexed
        return self.attend(query, scale, window, cap, sinks)

    def check(self, key: Tensor, value: Tensor, attention_mask: Any) -> None:
        self._mask, self._kv, self._expands, self._reads = attention_mask, (key, value), False, None
        if not self._cached:
            found = [index for index, cached in enumerate(self._cache.cached) if _are(cached, (key, value))]
            if not found:
                self._refuse("attends over KV that neither it nor another layer has cached")
            self._reads = found[0]
        elif not self._same((key, value), self._cached):
            self._expands = self._expanded(key, value)

    def _same(self, given: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
        return all(
            one is other or (one.shape == other.shape and (self._cache.shapes_only or bool((one == other).all())))
            for one, other in zip(given, expected, strict=True)
        )

    def _expanded(self, key: Tensor, value: Tensor) -> bool:
        """Whether K and V are what the layer's ``expand_kv`` makes of what it caches, token by token; or refuse it."""
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
        (k, v), told = self._kv, Visible(window)
        if (length := self._cache.length) is not None:
            try:
                chunk = chunk_of(self._mask, length, ROWS)
                told = Visible(chunk=chunk) if chunk else Visible(window_of(self._mask, length, ROWS, window))
            except UnknownMask as error:
                self._refuse(str(error))
        if self._indexed is not None and self._attended is None:
            self._refuse("has an indexer, but attends to all tokens")
        own = self._module.__dict__
        dtype = _smaller(*(self._cached or self._kv))
        scales = own.get(SCALES) and not own.get("use_rope")
        kind = LayerKind(
            heads=query.shape[1],
            kv_heads=k.shape[1],
            k_dim=k.shape[3],
            v_dim=v.shape[3],
            cached=(*(CachedTensor(states.shape[1], states.shape[3]) for states in self._cached), *self._index(dtype)),
            dtype=dtype,
            device=k.device,
            visible=told,
            expands=self._expands,
            reads=self._reads,
            temperature=(float(own["floor_scale"]), float(own["attn_scale"])) if scales else None,
            selects=None if self._attended is None else self._attended.most,
            index_dtype=None if self._indexed is None else self._indexed.keys.dtype,
        )
        self._cache.kinds.append(kind)
        self._cache.cached.append(self._cached)
        if self._cache.shapes_only and not self._cache.mixers:
            raise Enough
        if self._cache.length is None and not self._cache.shapes_only:
            if not isinstance(self._mask, Tensor) or self._mask.numel():
                self._refuse("gets another mask than the model was given, so it is not known what is hidden from it")
            self._compare(query, scale, window, cap, sinks)
        rows = [of[0].transpose(0, 1).flatten(1).float() for of in (query, k, v)]
        if self._indexed is not None:
            rows.append(self._indexed.keys[0].float())
        self._cache.rows.append(torch.cat(rows, 1))
        return v.repeat_interleave(kind.heads // kind.kv_heads, 1).transpose(1, 2).to(query.dtype).contiguous()

    def _index(self, dtype: torch.dtype) -> list[CachedTensor]:
        """The keys of the layer's own indexer, as numbers of the pool's dtype."""
        if self._indexed is None:
            return []
        keys = self._indexed.keys
        size = keys.shape[2] * keys.dtype.itemsize
        if size % dtype.itemsize:
            self._refuse(f"has index keys of {size} bytes, which are no whole numbers of {dtype}")
        return [CachedTensor(1, size // dtype.itemsize)]

    def _compare(
        self, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> None:
        """Refuse a layer whose attention function means something else by its arguments than attention over a tree."""
        eager = inspect.unwrap(original_class(self._module).forward).__globals__.get("eager_attention_forward")
        own = own_code(original_class(self._module))  # type: ignore[arg-type]  # classes hash
        if eager is None or own is not None:  # which is compared as a whole
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
        index = self._cache._numbers.index(layer_number(self._module))  # others lie between them
        raise UnsupportedModel(f"{self._cache.names[index]} ({original_class(self._module).__name__}) {what}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"asks its cache for {name!r}, which a tree does not have for a step of many sequences")


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Far closer than rows of other tokens or positions, if not equal: a product of other rows may round otherwise."""
    error, size = (one - other).abs().max(), one.abs().max()
    return bool(error <= torch.finfo(dtype).eps ** 0.5 * size)


def _are(cached: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> bool:
    """Whether these are the very same tensors."""
    return len(cached) == len(given) and all(one is other for one, other in zip(cached, given, strict=True))


def _smaller(k: Tensor, v: Tensor) -> torch.dtype:
    """Under autocast keys that were rotated in float32 are rounded to what values are, when they are used."""
    return min(k.dtype, v.dtype, key=lambda dtype: dtype.itemsize)
