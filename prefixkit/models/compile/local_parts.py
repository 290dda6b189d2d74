"""Stand-ins for modules that tensor parallelism splits, for compiled layers: they multiply by this process's part.

transformers sets a ``forward`` on such a module that replaces its weights by local tensors during a call, which the
compiler cannot trace.  A stand-in holds the local weights as parameters, so that q, k and v can be packed
(``packing.py``); the split weight keeps these parameters as its local part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from prefixkit.models.compile.part_exchange import part_exchange
from prefixkit.models.tensor_parallel import tp_size

# Styles of a plan: each process computes some of the outputs, or a part of every sum, or the whole result.
_PART_OF_OUTPUTS, _PART_OF_SUMS, _WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"


class SummedLinear(nn.Linear):
    """A linear layer whose weight is split by columns over processes, which sum their products."""

    group: Any
    addresses: Tensor | None  # see PartExchange

    def forward(self, input: Tensor) -> Tensor:
        if self.addresses is None:
            out = F.linear(input, self.weight)
            torch.distributed.all_reduce(out, group=self.group)
        else:
            weight = self.weight
            if torch.is_autocast_enabled(input.device.type):
                dtype = torch.get_autocast_dtype(input.device.type)
                input, weight = input.to(dtype), weight.to(dtype)
            part = torch.ops.prefixkit.part_of_product(input, weight)
            out = torch.ops.prefixkit.sum_parts(part, self.addresses, input.dtype)
        return out if self.bias is None else out + self.bias


class LocalParts:
    """The modules of a model that get stand-ins; none if the model is not split over processes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._styles: dict[nn.Module, str] = {}
        if tp_size(model) == 1:
            return
        self._exchange = part_exchange(model)
        plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
        for name, module in model.named_modules():
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
            if style == _WHOLE or (style in (_PART_OF_OUTPUTS, _PART_OF_SUMS) and type(module) is nn.Linear):
                self._styles[module] = style

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._styles

    def weights_of(self, module: nn.Module) -> list[Tensor | None]:
        """The local weights that stand-ins for a module, or for parts of it, would hold."""
        parts = [part for part in module.modules() if part in self] if self._styles else []
        return [None if one is None else _local(one) for part in parts for one in part._parameters.values()]

    def in_place_of(self, module: nn.Module) -> nn.Module:
        """The module, or a shallow copy of it in which stand-ins replace modules that are split."""
        if not self._styles:
            return module
        if (style := self._styles.get(module)) is not None:
            held = {name: None if one is None else _parameter(one) for name, one in module._parameters.items()}
            if style == _PART_OF_SUMS:
                exchange, weight = self._exchange, module.get_parameter("weight")
                to = {"group": exchange.group, "addresses": exchange.addresses_for(weight)}
                return copy_of_module(module, SummedLinear, _parameters=held, **to)
            return copy_of_module(module, type(module), _parameters=held)
        inner = {name: part and self.in_place_of(part) for name, part in module._modules.items()}
        if all(part is module._modules[name] for name, part in inner.items()):
            return module
        return copy_of_module(module, type(module), _modules=inner)


def copy_of_module(module: nn.Module, cls: type[nn.Module], **changes: Any) -> nn.Module:
    """A shallow copy of a module, of another class and with other attributes, without a ``forward`` of its own."""
    copy: nn.Module = object.__new__(cls)
    copy.__dict__.update({name: value for name, value in module.__dict__.items() if name != "forward"})
    copy.__dict__.update(changes)
    return copy


def _local(weight: Tensor) -> Tensor:
    name = _name_of_local(weight)
    part: Tensor = weight if name is None else getattr(weight, name)
    return part


def _parameter(weight: Tensor) -> nn.Parameter:
    """The local part of a weight as a parameter, which replaces the part that the weight holds."""
    name, part = _name_of_local(weight), _local(weight)
    if type(part) is nn.Parameter:
        return part
    made = nn.Parameter(part, requires_grad=False)
    if name is not None:
        setattr(weight, name, made)
    return made


def _name_of_local(weight: Tensor) -> str | None:
    """The attribute of a DTensor that holds its local part; None for other weights."""
    flatten = getattr(weight, "__tensor_flatten__", None)
    return None if flatten is None else str(flatten()[0][0])
