"""What the modules of a model that keep a state keep, recorded for the probe."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from prefixkit.kv.state_pool import States, StateTensor
from prefixkit.models.attention_class import original_class
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.probe.measured import ROWS
from prefixkit.models.states.going_on import measure_state


class ProbedStates:
    """The states of one pass.

    Args:
        modules: The modules that keep a state, by name.

    Attributes:
        names: The names of these modules.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names = {module: name for name, module in modules.items()}
        # Per module, and per layer of the model's cache in which it keeps a state: the tensors, and where they are.
        self._kept: dict[nn.Module, dict[int, tuple[tuple[StateTensor, ...], torch.device]]] = {}

    def measure(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, check: bool) -> Any:
        """The output of a module if each row is a text of its own.

        Raises:
            UnsupportedModel: the module runs twice on one state; or, if ``check``, it continues from a state otherwise
                than in one text.
        """

        def refuse(what: str) -> NoReturn:
            raise UnsupportedModel(f"{self.names[module]} ({original_class(module).__name__}) {what}")

        made, states, layer = measure_state(module, args, kwargs, ROWS, refuse if check else None)
        if layer in (kept := self._kept.setdefault(module, {})):
            refuse(f"runs twice in one pass for layer {layer}, and a tree holds one state of each module and layer")
        kept[layer] = states, (made[0] if isinstance(made, tuple) else made).device
        return made

    @property
    def modules(self) -> int:
        """How many modules have run."""
        return len(self._kept)

    @property
    def found(self) -> States:
        """The state tensors of each module, in the order of the modules and of their runs."""
        return tuple(states for module in self.names for states, _ in self._kept.get(module, {}).values())

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where each of them is kept."""
        return tuple(device for module in self.names for _, device in self._kept.get(module, {}).values())

    @property
    def calls(self) -> tuple[int, ...]:
        """How often each module runs if any runs several times; else empty."""
        found = tuple(len(self._kept.get(module, {})) for module in self.names)
        return found if max(found, default=1) > 1 else ()
