"""Kinds of attention layers: what a layer caches for each token, and what it attends over."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.rotation import Rotation
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.variants import Variant
from prefixkit.attention.visible import ALL, Visible


@dataclass(frozen=True)
class CachedTensor:
    """One tensor that a layer caches: ``[heads, head_dim]`` for each token; of no element where a layer of latents has
    no rotary keys.

    Raises:
        ValueError: no heads, or a size below 0.
    """

    heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, least in (("heads", 1), ("head_dim", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"CachedTensor: {name} must be at least {least}, got {getattr(self, name)}")

    @property
    def size(self) -> int:
        """Elements of one token."""
        return self.heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.heads} x {self.head_dim}"


@dataclass(frozen=True)
class Compressed:
    """What a layer caches of each token for one of its compressors: two vectors, as one tensor.

    Attributes:
        name: By which the compressor asks its cache.
        kv, gate: Elements of each.
    """

    name: str
    kv: int
    gate: int


@dataclass(frozen=True)
class PlanKind:
    """Layers of one plan: attention heads, what queries see, whether K and V are made while attention runs, whether
    each query sees tokens that are selected for it, whether the layer adds to the scores, or attends to compressed
    tokens too, and which part of attention over latents it is, if not all.
    """

    shape: HeadShape
    visible: Visible
    expands: bool
    selects: bool = False
    biased: bool = False
    compresses: bool = False
    part: LatentPart | None = None

    @property
    def plain(self) -> bool:
        """Whether the op for attention over K and V in pages alone does not compute it (see ``PlainLayer``)."""
        return self.expands or self.selects or self.biased or self.compresses


@dataclass(frozen=True)
class LayerKind:
    """What one attention layer caches and attends over, as measured, and what its user adds.

    Attributes:
        heads: Query heads; those of this process under tensor parallelism, as all heads here.
        kv_heads: KV heads that it attends over.
        k_dim, v_dim: Elements of a head of K and of V that it attends over.
        cached: The tensors that it caches: K and V, or a latent and rotary keys, and the keys of its indexer.  Empty
            where it ``reads`` others.
        dtype: Of what is cached, as the layer makes it and attends over it.
        device: Where that is made.
        stored: The dtype in which pages hold it; None: the same.
        visible: Which tokens a query sees.
        expands: Whether code of the layer makes K and V of what is cached (multi-head latent attention).
        absorbs: Whether queries may attend over what is cached instead, as K and V are linear in it.
        reads: The layer whose cached tensors it attends over; None for its own.
        selects: Of how many tokens, that an indexer selects for it, a query sees at most, or 0 where some of the fewest
            are left out; None: it sees all.
        selection_is_mask: Whether the layer's own indexer returns a mask in place of indices.
        biased: Whether the layer adds numbers of its own to the scores, for each head, query and position.
        compressed: What it caches to attend to compressed tokens too, the last of ``cached``.
        index_dtype: Of the keys by which the layer's own indexer selects, the last of ``cached``: the same bytes as
            numbers of ``dtype``.  None where it has none.
        temperature: ``(floor_scale, attn_scale)`` where queries are scaled by their position (Llama 4).
        variant: What the user of the model adds to the layer's own attention (``patch``); None for nothing.
        rotation: How queries turn with their position, where the variant asks for them at two; None: they do not.
    """

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    cached: tuple[CachedTensor, ...]
    dtype: torch.dtype
    device: torch.device
    visible: Visible = field(default=ALL)
    expands: bool = False
    absorbs: bool = False
    reads: int | None = None
    temperature: tuple[float, float] | None = None
    selects: int | None = None
    index_dtype: torch.dtype | None = None
    selection_is_mask: bool = False
    biased: bool = False
    compressed: tuple[Compressed, ...] = ()
    variant: Variant | None = None
    rotation: Rotation | None = None
    stored: torch.dtype | None = None

    @property
    def streams(self) -> bool:
        """Whether queries attend at positions in the cache: to a window by one plan, and to sinks by another."""
        return self.variant is not None and self.variant.streaming is not None

    @property
    def read_range(self) -> Visible:
        """Outside of which nothing is read: what the layer shows, as far as the user's variant does too."""
        return self.visible if self.variant is None else self.visible.within(self.variant.visible)

    @property
    def attended(self) -> int:
        """How many of the cached tensors are K and V, or make them: the first ones."""
        return len(self.cached) - (self.index_dtype is not None) - len(self.compressed)

    @property
    def shape(self) -> HeadShape:
        """The heads that it attends with."""
        v_dim = None if self.v_dim == self.k_dim else self.v_dim
        return HeadShape(self.heads, self.kv_heads, self.k_dim, (self.stored or self.dtype).itemsize, v_dim)

    @property
    def plain(self) -> bool:
        """Whether the op for attention over K and V in pages alone does not compute it."""
        return any(kind.plain for kind in self.plan_kinds)

    @property
    def plan_kinds(self) -> tuple[PlanKind, ...]:
        """What plans for it must be made for: one; or one for each of the two parts of attention over latents, or for
        the window and the sinks.
        """
        if self.variant is not None and self.streams:
            return tuple(PlanKind(self.shape, part.visible, self.expands) for part in self.variant.parts)
        if not self.absorbs:
            others = self.selects is not None, self.biased, bool(self.compressed)
            return (PlanKind(self.shape, self.read_range, self.expands, *others),)
        sizes = [tensor.head_dim for tensor in self.cached]
        parts = [LatentPart(part, self.shape, *sizes) for part in (Part.EXPANDED, Part.ABSORBED)]
        return tuple(PlanKind(part.shape, self.visible, expands=True, part=part) for part in parts)

    def __str__(self) -> str:
        size = str(self.k_dim) if self.k_dim == self.v_dim else f"{self.k_dim} and {self.v_dim}"
        text = f"{self.heads} query and {self.kv_heads} KV heads of {size}, {self.dtype} on {self.device}"
        if self.stored is not None:
            text += f", held in {self.stored}"
        if self.expands:
            text += f", made of {' and '.join(map(str, self.cached[: self.attended]))}"
        if self.selects is not None:
            by = "an earlier layer" if self.index_dtype is None else f"index keys of {self.cached[-1]}"
            text += f", of {self.selects or ''} tokens selected by {by}".replace("  ", " ")
        if self.compressed:
            text += f", with compressed tokens of {' and '.join(str(one.kv + one.gate) for one in self.compressed)}"
        if self.biased:
            text += ", with a bias for each head, query and position"
        if self.reads is not None:
            text += f", reading layer {self.reads}"
        if self.variant is not None:
            text += f", with the variant {self.variant.name}"
        return text + (f", {self.visible}" if self.visible != ALL else "")
