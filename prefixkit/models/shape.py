"""Head counts, sizes and types, read from a model's local modules and tensors."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from prefixkit.models.errors import UnsupportedModel
from prefixkit.models.families import attention_layers
from prefixkit.ops.checks import FLOATS
from prefixkit.ops.kv_pool import KVSpec


def kv_spec(model: nn.Module) -> KVSpec:
    """What a :class:`KVPool` must hold for ``model``, patched or not.

    Counts come from the projections at hand, not from the config, so a tensor-parallel shard gets its own share.

    Raises:
        UnsupportedModel: see :func:`attention_layers`; or the layers differ in shape, type or device.
    """
    layers = attention_layers(model).values()
    specs = {(*_heads(module)[1:], *_dtype_and_device(model, module)) for module in layers}
    if len(specs) > 1:
        raise UnsupportedModel(
            f"the layers of {type(model).__name__} differ in (kv_heads, head_dim, dtype, device): "
            f"{sorted(map(str, specs))}; a pool needs them equal"
        )
    kv_heads, head_dim, dtype, device = specs.pop()
    return KVSpec(num_layers=len(layers), kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)


def query_heads(model: nn.Module) -> int:
    """Query heads of each attention layer of ``model``, as far as this process computes them.

    Raises:
        UnsupportedModel: see :func:`attention_layers`; or the layers differ.
    """
    heads = {_heads(module)[0] for module in attention_layers(model).values()}
    if len(heads) > 1:
        raise UnsupportedModel(
            f"the layers of {type(model).__name__} have {sorted(heads)} query heads; a plan needs them equal"
        )
    return heads.pop()


def _heads(module: nn.Module) -> tuple[int, int, int]:
    """Query heads, KV heads and the size of a head of an attention module."""
    head_dim = int(module.head_dim)  # type: ignore[arg-type]
    if hasattr(module, "qkv_proj"):
        heads_in_all = _rows(module.qkv_proj) // head_dim
        kv_heads = heads_in_all // (int(module.num_key_value_groups) + 2)  # type: ignore[arg-type]
        return heads_in_all - 2 * kv_heads, kv_heads, head_dim
    return _rows(module.q_proj) // head_dim, _rows(module.k_proj) // head_dim, head_dim


def _rows(projection: object) -> int:
    """Output features that this process computes: the local shard's rows, or what a quantised layer declares."""
    weight = getattr(projection, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point():
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        return int(local.shape[0])
    return int(projection.out_features)  # type: ignore[attr-defined]


def _dtype_and_device(model: nn.Module, module: nn.Module) -> tuple[torch.dtype, torch.device]:
    """The dtype of the layer's keys, which is that of its plain weights, and the device that it runs on."""
    weights = [*module.parameters()]
    dtype = next(one.dtype for one in chain(weights, model.parameters()) if one.dtype in FLOATS)
    device = weights[0].device
    return dtype, _execution_device(module) if device.type == "meta" else device


def _execution_device(module: nn.Module) -> torch.device:
    """Where accelerate brings the weights of an offloaded layer for each call."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if (device := getattr(each, "execution_device", None)) is not None:
                return torch.device(device)
    raise UnsupportedModel(
        f"the weights of {type(module).__name__} are on the meta device and no accelerate hook brings them to another; "
        "load them first"
    )
