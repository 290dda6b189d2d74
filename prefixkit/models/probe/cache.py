"""A cache that poses as one that holds a text, and records what each attention layer of a model does with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from prefixkit.attention.visible import Visible
from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.kv.state_pool import States, StateTensor
from prefixkit.models.attention_class import layer_number, original_class
from prefixkit.models.indexing.text_positions import text_positions
from prefixkit.models.layered_cache import LayeredCache
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.probe.indexer import Selection
from prefixkit.models.probe.measured import ORDER, ROWS, TOKENS
from prefixkit.models.probe.probed_layer import ProbedLayer
from prefixkit.models.states.going_on import measure_state


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
        self.mixers = {} if mixers is None else {module: name for name, module in mixers.items()}
        # Per module that keeps a state, and per layer of the cache in which it does: the tensors, and where they are.
        self.states: dict[nn.Module, dict[int, tuple[tuple[StateTensor, ...], torch.device]]] = {}
        self._numbers = tuple(map(layer_number, layers.values()))
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
        """Measure a module that keeps a state, apart from attention: each row is a text of its own."""
        name = self.mixers[module]

        def refuse(what: str) -> NoReturn:
            raise UnsupportedModel(f"{name} ({original_class(module).__name__}) {what}")

        in_step = self.length is None  # states are checked in this pass alone
        made, states, layer = measure_state(module, args, kwargs, ROWS, refuse if in_step else None)
        if layer in (known := self.states.setdefault(module, {})):
            refuse(f"runs twice in one pass for layer {layer}, and a tree holds one state of each layer")
        known[layer] = states, (made[0] if isinstance(made, tuple) else made).device
        return made

    def sort(self) -> None:
        """Put the layers in the order of their numbers; a looped model runs them in another."""
        order = sorted(range(len(self.ran)), key=lambda place: self.ran[place][0])
        if order == list(range(len(order))):
            return
        after = {before: place for place, before in enumerate(order)}
        read = [kind if kind.reads is None else replace(kind, reads=after[kind.reads]) for kind in self.kinds]
        self.kinds, self.cached = [read[at] for at in order], [self.cached[at] for at in order]
        self.rows, self.ran = [self.rows[at] for at in order], [self.ran[at] for at in order]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the attention layers if other layers lie between them; else empty."""
        ran = {module for _, module in self.ran}
        found = tuple(layer for layer, _ in self.ran) if len(ran) == len(self.modules) else self._numbers
        return () if found == tuple(range(len(found))) else found

    @property
    def computed_by(self) -> tuple[int, ...]:
        """The number of the module that computes each attention layer if one computes several; else empty."""
        found = tuple(layer_number(module) for _, module in self.ran)
        return found if len(set(found)) < len(found) else ()

    @property
    def found_states(self) -> States:
        """The state tensors of each module that keeps a state, in the order of the modules and of their calls."""
        return tuple(states for module in self.mixers for states, _ in self.states.get(module, {}).values())

    @property
    def state_devices(self) -> tuple[torch.device, ...]:
        """Where each of them is kept."""
        return tuple(device for module in self.mixers for _, device in self.states.get(module, {}).values())

    @property
    def state_calls(self) -> tuple[int, ...]:
        """How often each module that keeps a state runs if any runs several times; else empty."""
        found = tuple(len(self.states.get(module, {})) for module in self.mixers)
        return found if max(found, default=1) > 1 else ()

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
        device = next(next(iter(self.mixers or self.modules)).parameters()).device
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
