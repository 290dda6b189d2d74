"""A layer whose attention is more than attention over K and V in pages: it expands K and V from latents, attends to
tokens that an indexer selects, or adds a bias to scores.  Plain torch computes it, except latents where kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from prefixkit.attention.step import Step
from prefixkit.models.indexing.compressors import Entries, with_entries
from prefixkit.models.indexing.index_keys import StepCompressor, StepIndexer
from prefixkit.models.indexing.indexers import Block, IndexerCall, is_selection_mask, selected_of
from prefixkit.models.latents.latent_layer import attend_latents
from prefixkit.models.latents.latent_maps import EXPAND
from prefixkit.models.layer import Layer
from prefixkit.models.layered_cache import LayerCache
from prefixkit.models.model_errors import IncompleteStep
from prefixkit.ops.backend import plain_torch

MASK_OF = "build_attention_mask_from_topk"  # a method of attention modules that makes a mask from selected tokens


class SelectingLayer(LayerCache, Protocol):
    """The cache of an attention module that attends to tokens selected by an indexer, its own or that of an earlier
    layer.
    """

    def select(self, indexer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The indexer's selection for these arguments: ``[1, T, k]`` int32 positions in each row's text, where -1 is no
        token and ``k = 0`` means all tokens; or the mask of a step.
        """

    def set_selected(self, indices: Tensor) -> None:
        """Attend to the tokens at ``indices [1, T, k]``, which :meth:`select` has returned."""

    def mask_of(self, own: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Attend to the selected tokens, which are the first argument or ``topk_indices``; returns the mask of a step
        instead of the mask that the module's own code makes from them.
        """


class CompressingLayer(LayerCache, Protocol):
    """The cache of an attention module that also attends to compressed tokens."""

    def compress(self, compressor: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Run the module's compressor; returns no entries and the mask of a step, in place of its entries and their
        bias.
        """


class BiasedLayer(LayerCache, Protocol):
    """The cache of an attention module that adds a bias to scores."""

    def add(self, bias: Tensor) -> None:
        """Add ``[1, heads, T, positions]`` to the scores of each row with the positions of its text."""


def select(layer: LayerCache, indexer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The function that an attention module's code calls instead of its indexer; ValueError as :func:`set_selected`."""
    return _selecting(layer, indexer).select(indexer, args, kwargs)


def compress(layer: LayerCache, compressor: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The function that it calls instead of its compressor; ValueError if the layer does not accept entries."""
    if not hasattr(layer, "compress"):
        raise ValueError(f"{type(layer).__name__} takes no compressed tokens, of {type(compressor).__name__}")
    return cast(CompressingLayer, layer).compress(compressor, args, kwargs)


def mask_of(layer: LayerCache, own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The function that it calls instead of its method :data:`MASK_OF`; ValueError as :func:`set_selected`."""
    return _selecting(layer, own).mask_of(own, args, kwargs)


def set_selected(layer: LayerCache, indices: Tensor) -> None:
    """:meth:`SelectingLayer.set_selected`; ValueError if the layer does not accept selected tokens."""
    _selecting(layer, indices).set_selected(indices)


def add(layer: LayerCache, bias: Tensor) -> None:
    """:meth:`BiasedLayer.add`; ValueError if the layer does not accept a bias."""
    if not hasattr(layer, "add"):
        raise ValueError(f"{type(layer).__name__} takes no bias of {tuple(bias.shape)} on its scores")
    cast(BiasedLayer, layer).add(bias)


def _selecting(layer: LayerCache, by: object) -> SelectingLayer:
    if not hasattr(layer, "set_selected"):
        raise ValueError(f"{type(layer).__name__} takes no tokens that are selected, by {type(by).__name__}")
    return cast(SelectingLayer, layer)


def row_offsets(positions: Tensor) -> Tensor:
    """``[T]`` the difference of each row's position in its text and its index in the step."""
    return positions - torch.arange(positions.shape[0], device=positions.device)


class PlainLayer(Layer):
    """A step's layer whose attention is more than attention over K and V in pages.

    Attributes:
        module: The attention module.
        blocks: The step's rows in blocks for indexers, by plan index; made once for all layers.
        equal_blocks: The same in blocks for compressors, of texts of equal length.
        indexed: Whether the layer's own indexer has run.
        taken: Whether :meth:`set_selected` has set the selected tokens.
        selected: ``[T, positions]`` bool the tokens that each row sees; None: all tokens.
        bias: ``[T, heads, positions]`` the bias added to scores; None: no bias.
        entries: The entries that the layer's compressor has made in the step; None: it has not run.
    """

    module: nn.Module
    blocks: dict[int, list[Block]]
    equal_blocks: dict[int, list[Block]]
    indexed = taken = False
    selected: Tensor | None = None
    bias: Tensor | None = None
    entries: list[Entries] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest text of the step, up to its last row in the step."""
        assert isinstance(self.step, Step), "compiled layers have no plain attention"
        return int(self.step.plans[self.own.plan].tree.positions.max()) + 1

    def select(self, indexer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """See :class:`SelectingLayer`: the indexer's keys are appended to the pool, and it scores each row's text."""
        assert isinstance(self.step, Step), "compiled layers have no indexers"
        call = IndexerCall(indexer, args, kwargs, self, self.step.num_rows, self.longest)
        found = StepIndexer(self.own, self.step, self.blocks).select(call)
        self.indexed = True
        if not is_selection_mask(found):
            return found
        self.taken, self.selected = True, found[0] if found.shape[2] else None
        return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=found.device)

    def set_selected(self, indices: Tensor) -> None:
        """See :class:`SelectingLayer`."""
        self.taken = True
        if indices.shape[2]:
            self.selected = selected_of(indices, self.longest)

    def mask_of(self, own: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """See :class:`SelectingLayer`."""
        indices: Tensor = kwargs["topk_indices"] if "topk_indices" in kwargs else args[0]
        self.set_selected(indices)
        return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=indices.device)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Number of positions of the longest text, and the first position, from which a layer makes its bias."""
        return self.longest, 0

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:
        """See :func:`row_offsets`."""
        return row_offsets(self.step.positions)

    def add(self, bias: Tensor) -> None:
        """See :class:`BiasedLayer`.

        Raises:
            IncompleteStep: the probe of the model has found no bias, or the bias has another shape than in this step.
        """
        rows, heads = self.step.positions.shape[0], self.own.kind.heads
        if not self.own.kind.biased or bias.shape != (1, heads, rows, self.longest):
            raise IncompleteStep(
                f"StepCache: layer {self.own.index} adds {list(bias.shape)} to its scores, which is not what it did "
                "when the model was measured"
            )
        self.bias = bias[0].transpose(0, 1)

    def compress(self, compressor: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """See :class:`CompressingLayer`: tokens' vectors are appended to the pool, and each text's are compressed."""
        assert isinstance(self.step, Step), "compiled layers have no compressors"
        call = IndexerCall(compressor, args, kwargs, self, self.step.num_rows, 0)
        self.entries = StepCompressor(self.own, self.step, self.equal_blocks).entries(call)
        kv = self.entries[0].kv
        mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=kv.device)
        return kv.new_empty((1, 1, 0, kv.shape[2])), mask

    def attend_plain(self, query: Tensor, scale: float, variant: str, sinks: Tensor | None) -> Tensor:
        """Attention, ``[T, heads, v_dim]`` before :meth:`finished`, over K and V that the layer's own code expands, to
        selected tokens, or with a bias.

        Raises:
            IncompleteStep: the layer's indexer has not run, so its keys are missing; or the layer lacks its selected
                tokens, its bias or its compressed tokens.
        """
        kind = self.own.kind
        if self.own.index_pages is not None and not self.indexed:
            raise IncompleteStep(f"StepCache: layer {self.own.index} attends, but its indexer has not run in this step")
        missing = (kind.selects is not None and not self.taken) or (kind.biased and self.bias is None)
        if missing or (kind.compressed and self.entries is None):
            what = "selected tokens, its bias or its compressed tokens"
            raise IncompleteStep(f"StepCache: layer {self.own.index} attends without its {what}")
        if self.own.absorbed is not None:
            assert isinstance(self.step, Step), "such layers are not compiled"
            plans, q = self.step.plans, self.asked(query, self.step.positions)
            parts = plans[self.own.plan], plans[self.own.absorbed]
            shape = self.own.kind.shape
            return attend_latents(self.module, self.own.pages, shape, self.step, parts, q, scale, variant)
        attention = plain_torch().expanded_attention
        assert attention is not None, "plain torch has it"
        rows, apart = self.asked(query, self.step.positions), sinks if self.apart(sinks) else None
        out, lse = attention(
            rows,
            self.own.pages,
            getattr(self.module, EXPAND) if kind.expands else None,
            self.step.positions,
            self.plan,
            scale,
            variant,
            None if sinks is None or apart is not None else sinks.to(query.dtype),
            self.selected,
            self.bias,
        )
        if self.entries is not None:
            out = with_entries(rows, out, lse, self.entries, scale, apart)
        elif apart is not None:
            out = (out.float() * torch.sigmoid(lse - apart.float())[..., None]).to(out.dtype)
        return out

    def apart(self, sinks: Tensor | None) -> bool:
        """Whether sinks join the softmax after attention to tokens: sinks per row, or with compressed tokens."""
        return sinks is not None and (sinks.ndim == 2 or bool(self.own.kind.compressed))
