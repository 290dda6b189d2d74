"""A step for the layers that lie on other devices than the first layer."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkit.attention.step import Step

OTHER_POSITIONS = (
    "StepCache: the model ran with position_ids other than the step's, so its position embeddings are wrong; call "
    "model(**cache.inputs())"
)


class OtherDevices:
    """The copies of a step on other devices, and whether layers there got its positions."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._copies: dict[torch.device, Step] = {}
        self._unequal: dict[torch.device, Tensor] = {}

    def step_on(self, device: torch.device) -> Step:
        """The step for layers on a device; copied there once."""
        if device not in self._copies:
            self._copies[device] = self._step.on(device)
        return self._copies[device]

    def compare_later(self, device: torch.device, position_ids: Tensor) -> None:
        """Let :meth:`check` compare the positions that layers on a device got, copied there, with the step's.

        The host does not wait for the copy here.  Those of the first of these layers are compared.
        """
        if device not in self._unequal:
            self._unequal[device] = (position_ids != self.step_on(device).positions).any()

    def check(self) -> None:
        """Raise ValueError if layers got other positions than the step's."""
        if any(map(bool, self._unequal.values())):
            raise ValueError(OTHER_POSITIONS)
