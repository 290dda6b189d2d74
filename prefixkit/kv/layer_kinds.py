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
    """One tensor that a layer caches: ``[heads, head_dim]`` for each token; ``head_dim`` is 0 for the rotary keys of a
    latent layer without any.

    Raises:
        ValueError: ``heads`` below 1, or ``head_dim`` below 0.
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
    """What a layer caches for each token and one of its compressors: two vectors, as one tensor.

    Attributes:
        name: The name under which the compressor reads its cache.
        kv, gate: Elements of each vector.
    """

    name: str
    kv: int
    gate: int


@dataclass(frozen=True)
class PlanKind:
    """What layers that share a plan have in common: attention heads, what queries see, whether K and V are made while
    attention runs, whether each query sees only tokens selected for it, whether the layer adds to the scores or attends
    to compressed tokens too, which part of attention over latents the plan is for, if there are two, and the device.
    """

    shape: HeadShape
    visible: Visible
    expands: bool
    selects: bool = False
    biased: bool = False
    compresses: bool = False
    part: LatentPart | None = None
    device: torch.device = field(kw_only=True)

    @property
    def plain(self) -> bool:
        """Whether attention needs more than the op over K and V in pages computes (see ``PlainLayer``)."""
        return self.expands or self.selects or self.biased or self.compresses


@dataclass(frozen=True)
class LayerKind:
    """What one attention layer caches and attends over, as measured, and what the user of the model adds.

    Attributes:
        heads: Query heads.  Under tensor parallelism all numbers of heads here are those of this process.
        kv_heads: KV heads that the layer attends over.
        k_dim, v_dim: Elements of a head of K and of V that the layer attends over.
        cached: The tensors that the layer caches: K and V, or a latent and rotary keys; then the keys of its indexer.
            Empty if it ``reads`` another layer's.
        dtype: The dtype in which the layer makes the cached tensors and attends over them.
        device: Where the layer makes them.
        stored: The dtype in which pages hold them; None: ``dtype``.
        visible: Which tokens a query sees.
        expands: Whether the layer makes K and V from the cached tensors (multi-head latent attention).
        absorbs: Whether queries may attend over the cached tensors instead, as K and V are linear in them.
        reads: The layer whose cached tensors this layer attends over; None: its own.
        selects: The most tokens that an indexer selects for a query, or 0 if it leaves out tokens even in short texts;
            None: a query sees all tokens.
        selection_is_mask: Whether the layer's own indexer returns a mask in place of indices.
        biased: Whether the layer adds numbers of its own to the scores, for each head, query and position.
        compressed: What the layer caches to attend to compressed tokens too: the last tensors of ``cached``.
        index_dtype: The dtype of the keys by which the layer's own indexer selects, the last of ``cached``, which
            stores their bytes as numbers of ``dtype``.  None if the layer has no indexer.
        temperature: ``(floor_scale, attn_scale)`` if queries are scaled by their position (Llama 4).
        variant: What the user of the model adds to the layer's own attention (``patch``); None for nothing.
        rotation: The rotary embedding of queries, if the variant needs them at two positions; None: they do not turn.
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
        """Whether queries attend at positions in the cache: one plan covers the window, another the sinks."""
        return self.variant is not None and self.variant.streaming is not None

    @property
    def read_range(self) -> Visible:
        """The range that attention reads: tokens visible by both the layer's own mask and the user's variant."""
        return self.visible if self.variant is None else self.visible.within(self.variant.visible)

    @property
    def attended(self) -> int:
        """How many cached tensors, from the first, are K and V or what K and V are made from."""
        return len(self.cached) - (self.index_dtype is not None) - len(self.compressed)

    @property
    def shape(self) -> HeadShape:
        """The heads that the layer attends with."""
        v_dim = None if self.v_dim == self.k_dim else self.v_dim
        return HeadShape(self.heads, self.kv_heads, self.k_dim, (self.stored or self.dtype).itemsize, v_dim)

    @property
    def plain(self) -> bool:
        """Whether the layer needs more than the op over K and V in pages computes."""
        return any(kind.plain for kind in self.plan_kinds)

    @property
    def plan_kinds(self) -> tuple[PlanKind, ...]:
        """The kinds of plans that the layer needs: one; or two, for the two parts of attention over latents, or for the
        window and the sinks.
        """
        if self.variant is not None and self.streams:
            parts = self.variant.parts
            return tuple(PlanKind(self.shape, one.visible, self.expands, device=self.device) for one in parts)
        if not self.absorbs:
            others = self.selects is not None, self.biased, bool(self.compressed)
            return (PlanKind(self.shape, self.read_range, self.expands, *others, device=self.device),)
        sizes = [tensor.head_dim for tensor in self.cached]
        latents = [LatentPart(part, self.shape, *sizes) for part in (Part.EXPANDED, Part.ABSORBED)]
        return tuple(PlanKind(of.shape, self.visible, expands=True, part=of, device=self.device) for of in latents)

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
