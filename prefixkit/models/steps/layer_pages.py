"""The pages and plans that each attention layer attends with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from prefixkit.kv.kv_pool import KVPool
from prefixkit.kv.layer_kinds import LayerKind, PlanKind

_Owner = TypeVar("_Owner", bound=Hashable)


@dataclass(frozen=True, eq=False)
class LayerPages:
    """What a step needs to know of one attention layer.

    Attributes:
        index: The layer's number in the model's cache.
        kind: Its kind.
        plan: Index of the layer's plan among a step's plans; of its expanded part if it attends over latents.
        absorbed: Index of the plan of the absorbed part; None if the layer has none.
        pages: The tensors of the pool that it attends over: its own, or those of the layer that it reads.
        index_pages: The tensor with its indexer's keys; None if it has no indexer.
        compressed_pages: The tensors with the vectors that its compressors make of tokens.
        keys: Keys of the variants that it applies, by the arguments that it has passed.
        sinks: Index of the plan for the sinks if it attends at positions in the cache; else None.
        frequencies: ``[pairs]`` float32 the frequencies that rotate its queries; None if they are not rotated.
        elsewhere: The layer's device if it is not that of the step's tensors; else None.
        heads: Number and size of a token's heads in each of ``pages``.
        plain: See :class:`LayerKind`.
        module: The number of the attention module that computes the layer; a looped model's module computes several.
        masked: Whether a window, a chunk or a variant's masks may hide KV that it reads.
    """

    index: int
    kind: LayerKind
    plan: int
    pages: tuple[Tensor, ...]
    index_pages: Tensor | None = None
    compressed_pages: tuple[Tensor, ...] = ()
    absorbed: int | None = None
    keys: dict[Hashable, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    sinks: int | None = None
    frequencies: Tensor | None = None
    elsewhere: torch.device | None = None
    module: int = field(kw_only=True)
    heads: tuple[tuple[int, int], ...] = field(init=False)  # read in every step
    plain: bool = field(init=False)
    masked: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple((pages.shape[2], pages.shape[3]) for pages in self.pages))
        object.__setattr__(self, "plain", self.kind.plain)
        visible, variant = self.kind.visible, self.kind.variant
        by_range = visible.window is not None or visible.chunk is not None
        object.__setattr__(self, "masked", by_range or (variant is not None and bool(variant.parts[0].mask_mods)))


def layer_pages(
    kinds: Sequence[LayerKind],
    plan_kinds: Sequence[PlanKind],
    pool: KVPool,
    numbers: Sequence[int] = (),
    computed_by: Sequence[int] = (),
) -> list[LayerPages]:
    """The kind, plan and pages of each attention layer; ``numbers`` and ``computed_by``: see ``Probed``."""
    names = numbers or range(len(kinds))
    modules = computed_by or names
    number = iter(range(len(kinds)))
    own = {index: next(number) for index, kind in enumerate(kinds) if kind.cached}

    def of(index: int, kind: LayerKind) -> LayerPages:
        read = index if kind.reads is None else kind.reads
        pages = pool.pages(own[read])
        index_pages = None if kind.index_dtype is None else pages[-1]
        plan, *second = map(plan_kinds.index, kind.plan_kinds)
        absorbed, sinks = (None, *second) if kind.streams else (*second, *[None] * (2 - len(second)))
        frequencies = None if kind.rotation is None else torch.tensor(kind.rotation.frequencies, device=kind.device)
        compressed, attended = pages[len(pages) - len(kind.compressed) :], pages[: kinds[read].attended]
        more = compressed, absorbed, sinks, frequencies, None if kind.device == pool.spec.device else kind.device
        return LayerPages(names[index], kind, plan, attended, index_pages, *more, module=modules[index])

    return [of(index, kind) for index, kind in enumerate(kinds)]


def places_of(owners: Sequence[_Owner]) -> dict[_Owner, tuple[int, ...]]:
    """The places of each owner in a sequence."""
    found = dict[_Owner, tuple[int, ...]]()
    for place, owner in enumerate(owners):
        found[owner] = (*found.get(owner, ()), place)
    return found
