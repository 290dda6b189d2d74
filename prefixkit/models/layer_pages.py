"""Where each attention layer finds what it attends over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from prefixkit.kv.kv_pool import KVPool
from prefixkit.kv.layer_kinds import LayerKind, PlanKind


@dataclass(frozen=True, eq=False)
class LayerPages:
    """What a step needs to know of one attention layer.

    Attributes:
        index: The layer's number.
        kind: Its kind.
        plan: Which of a step's plans is for it.
        pages: The tensors of the pool that it attends over: its own, or those of the layer that it reads.
    """

    index: int
    kind: LayerKind
    plan: int
    pages: tuple[Tensor, ...]


def layer_pages(kinds: Sequence[LayerKind], plan_kinds: Sequence[PlanKind], pool: KVPool) -> list[LayerPages]:
    """Of each layer, its kind, plan and pages."""
    number = iter(range(len(kinds)))
    own = {index: next(number) for index, kind in enumerate(kinds) if kind.cached}
    return [
        LayerPages(
            index,
            kind,
            plan_kinds.index(kind.plan_kind),
            pool.pages(own[index if kind.reads is None else kind.reads]),
        )
        for index, kind in enumerate(kinds)
    ]
