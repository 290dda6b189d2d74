"""A layer of a step that plain torch alone computes: K and V made of latents, or tokens that an indexer selects."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn

from prefixkit.attention.step import Step
from prefixkit.models.indexing.index_keys import StepIndexer
from prefixkit.models.indexing.indexers import Block, selected_of
from prefixkit.models.latents.latent_layer import attend_latents
from prefixkit.models.latents.latent_maps import EXPAND
from prefixkit.models.layer import Layer, LayerCache
from prefixkit.models.model_errors import IncompleteStep
from prefixkit.ops.backend import plain_torch


class SelectingLayer(LayerCache, Protocol):
    """What stands for a cache to an attention module that attends to tokens which an indexer selects, its own or an
    earlier one.
    """

    def select(self, indexer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """``[1, T, k]`` int32: what the module's indexer returns for these arguments, in each row's own text; -1 stands
        for none, and no index at all for every token.
        """

    def attend_selected(
        self, indices: Tensor, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """``attend``, to the tokens at ``indices [1, T, k]``, which :meth:`select` has returned."""


def select(layer: LayerCache, indexer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """What an attention module's own code calls in place of its indexer; ValueError as :func:`attend_selected`."""
    return _selecting(layer, indexer).select(indexer, args, kwargs)


def attend_selected(layer: LayerCache, indices: Tensor, *args: Any) -> Tensor:
    """:meth:`SelectingLayer.attend_selected`; ValueError where the layer does not take selected tokens."""
    return _selecting(layer, indices).attend_selected(indices, *args)


def _selecting(layer: LayerCache, by: object) -> SelectingLayer:
    if not hasattr(layer, "attend_selected"):
        raise ValueError(f"{type(layer).__name__} takes no tokens that are selected, by {type(by).__name__}")
    return cast(SelectingLayer, layer)


class PlainLayer(Layer):
    """Attention of a step's layer in plain torch.

    Attributes:
        module: The attention module.
        blocks: The step's rows as indexers take them, by the number of a plan; made once for all layers.
        indexed: Whether the layer's own indexer has run.
        selected: ``[T, positions]`` bool what each row sees; None: everything.
    """

    module: nn.Module
    blocks: dict[int, list[Block]]
    indexed: bool = False
    selected: Tensor | None = None

    def select(self, indexer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """See :class:`SelectingLayer`: the indexer's keys go to the pool, and it scores those of each row's text."""
        assert isinstance(self.step, Step), "compiled layers have no indexers"
        found = StepIndexer(self.own, self.step, self.blocks).select(self, indexer, args, kwargs)
        self.indexed = True
        return found

    def attend_selected(
        self, indices: Tensor, query: Tensor, scale: float, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """:meth:`attend`, to selected tokens."""
        assert isinstance(self.step, Step), "compiled layers have no indexers"
        if indices.shape[2]:
            positions = self.step.plans[self.own.plan].tree.positions
            self.selected = selected_of(indices, int(positions.max()) + 1)
        return self.attend(query, scale, window, cap, sinks)

    def attend_plain(self, query: Tensor, scale: float, variant: str, sinks: Tensor | None) -> Tensor:
        """:meth:`attend`, over K and V that the layer's own code makes of what it caches, or to selected tokens.

        Raises:
            IncompleteStep: the layer's indexer has not run, so its keys are missing.
        """
        if self.own.index_pages is not None and not self.indexed:
            raise IncompleteStep(f"StepCache: layer {self.own.index} attends, but its indexer has not run in this step")
        if self.own.absorbed is not None:
            assert isinstance(self.step, Step), "such layers are not compiled"
            plans, q = self.step.plans, self.scaled(query)[0].transpose(0, 1)
            parts = plans[self.own.plan], plans[self.own.absorbed]
            shape = self.own.kind.shape
            return attend_latents(self.module, self.own.pages, shape, self.step, parts, q, scale, variant)[None]
        attention = plain_torch().expanded_attention
        assert attention is not None, "plain torch has it"
        out: Tensor = attention(
            self.scaled(query)[0].transpose(0, 1),
            self.own.pages,
            getattr(self.module, EXPAND) if self.own.kind.expands else None,
            self.step.positions,
            self.plan,
            scale,
            variant,
            None if sinks is None else sinks.to(query.dtype),
            self.selected,
        )[0]
        return out[None]
