"""Models whose layers lie on several devices, as accelerate dispatches them by a ``device_map``.

Accelerate's hooks move a module's inputs to the module's device, so that hidden states arrive there.  Each layer's KV
and states lie on the layer's device, plans are made there, and what layers read of a step is copied there once a step
(``StepCache.step_on``).  Sampling takes place on the first layer's device.
"""

from __future__ import annotations

import torch
from torch import nn

from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.probe.measured import Probed
from prefixkit.ops.arguments import FLOATS

_META = torch.device("meta")
_REMEDY = "convert the model, with model.float() for instance"


def is_spread(model: nn.Module) -> bool:
    """Whether a model's weights lie on several devices, apart from weights that accelerate loads for each step."""
    return len({weight.device for weight in model.parameters()} - {_META}) > 1


def check_storage(model: nn.Module, probed: Probed) -> None:
    """Raise UnsupportedModel unless a pool holds what all layers cache."""
    name, layers = type(model).__name__, probed.layers
    devices = {layer.device: None for layer in layers} | dict.fromkeys(probed.state_devices)
    places = " and ".join(map(str, devices))
    if len({device.type for device in devices}) > 1:
        raise UnsupportedModel(
            f"the layers of {name} run on {places}, and a pool holds KV on devices of one type; load the model with a "
            "device_map of GPUs alone"
        )
    if len(devices) > 1 and any(weight.device == _META for weight in model.parameters()):
        raise UnsupportedModel(
            f"the layers of {name} run on {places}, and accelerate loads some of their weights anew for each step, so "
            'that no KV outlives a step; load the model with a device_map without "cpu" and "disk", on more GPUs'
        )
    if len(dtypes := dict.fromkeys(str(layer.dtype) for layer in layers)) > 1:
        raise UnsupportedModel(f"the layers of {name} cache {', '.join(dtypes)}, and a pool holds one dtype; {_REMEDY}")
    caches = [bool(layer.cached) for layer in layers]
    if True in caches[sum(caches) :]:
        raise UnsupportedModel(f"{name} has layers that share KV before layers that cache their own")
    if layers and (dtype := layers[0].dtype) not in FLOATS:
        raise UnsupportedModel(
            f"the keys of {name} are {dtype}, and a tree holds {', '.join(map(str, FLOATS))}; {_REMEDY}"
        )
