"""Evaluating expressions in plain torch, for all scores of a block at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.variants.expression import ARGUMENTS, Captured, Expression, Node
from prefixkit.attention.variants.operations import OPERATIONS


def evaluate(expression: Expression, **arguments: Tensor) -> Tensor:
    """The value of an expression.

    Args:
        arguments: Tensors that broadcast, by their names in ``expression.ARGUMENTS``: ``score`` floats, the others
            int64; arguments that the expression does not read may be missing.

    Returns:
        A tensor that broadcasts against the arguments, no larger than the arguments that the expression reads.

    Raises:
        IndexError: a captured tensor has no element at an index.
    """
    device = next(iter(arguments.values())).device
    values: list[Any] = []
    for node in expression.nodes:
        values.append(_value(expression, node, values, arguments, device))
    return torch.as_tensor(values[-1], device=device)


def _value(
    expression: Expression, node: Node, values: list[Any], arguments: dict[str, Tensor], device: torch.device
) -> Any:
    operands = [values[arg] for arg in node.args]
    if node.op == "argument":
        return arguments[ARGUMENTS[node.slot]]
    if node.op == "scalar":
        return expression.scalars[node.slot]
    if node.op == "load":
        tensor = on_device(expression.tensors[node.slot], device).detach()
        found = tensor[tuple(torch.as_tensor(index, device=device) for index in operands)] if operands else tensor
        # As kernels do; torch would compute in the tensor's own dtype, whose wrapping the expression has.
        if found.dtype in (torch.bfloat16, torch.float16):
            return found.float()
        return found if found.dtype == torch.bool or found.is_floating_point() else found.long()
    return OPERATIONS[node.op].compute(*operands)


def on_device(captured: Captured, device: torch.device) -> Tensor:
    """A captured tensor on ``device``; :class:`ForeignTensor` if the function itself could not read it there."""
    tensor = captured.tensor
    if tensor.device == device:
        return tensor
    if captured.follows or tensor.ndim == 0:
        return tensor.detach().to(device)
    raise ForeignTensor(
        f"a variant captures a tensor of shape {list(tensor.shape)} on {tensor.device}, but its scores are on "
        f"{device}; move it there, or write tensor.to(q_idx.device)[...]"
    )


def pointwise(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Apply a function of 0-d tensors elementwise to arguments that broadcast; the result has their common shape."""
    shape = np.broadcast_shapes(*(tensor.shape for tensor in arguments))
    if 0 in shape:  # vmap refuses empty tensors
        return function(*(tensor.new_zeros(()) for tensor in arguments)).expand(shape)
    found: Tensor = torch.vmap(function)(*(tensor.expand(shape).reshape(-1) for tensor in arguments))
    return found.reshape(shape)


class ForeignTensor(ValueError):
    """A variant captures a tensor on another device."""
