"""Head counts, sizes and types, read from a model's local modules and tensors."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from prefixkit.models.attention import forward_below
from prefixkit.models.errors import UnsupportedModel
from prefixkit.models.families import attention_layers, pretrained_model
from prefixkit.ops.checks import FLOATS
from prefixkit.ops.kv_pool import KVSpec

log = logging.getLogger("prefixkit")


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
    """The dtype of the layer's keys, and the device that it runs on."""
    tensors = [*module.parameters(), *module.buffers()] or [*model.parameters()]
    device = tensors[0].device
    device = _execution_device(module) if device.type == "meta" else device
    dtype = _plain_dtype(module)
    if dtype is None or torch.is_autocast_enabled(device.type) or _has_own_forward(pretrained_model(model)):
        dtype = _measured_dtype(model, int(module.layer_idx), device)  # type: ignore[arg-type]
    if dtype not in FLOATS:
        raise UnsupportedModel(
            f"the keys of {type(model).__name__} are {dtype}, and a tree holds {', '.join(map(str, FLOATS))}; convert the "
            "model, with model.float() for instance"
        )
    return dtype, device


def _has_own_forward(model: nn.Module) -> bool:
    """Whether a model was given a ``forward`` of its own, as for mixed precision; accelerate's hooks change no dtype."""
    return "forward" in model.__dict__ and "_hf_hook" not in model.__dict__


def _plain_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the weights that make keys; None where that is not the keys' own: of quantised weights, say."""
    projection = getattr(module, "qkv_proj", None) or getattr(module, "k_proj", None)
    weight = getattr(projection, "weight", None)
    plain = isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize > 1
    return weight.dtype if plain and isinstance(weight, Tensor) else None


# Of each model, by what may change it: the dtypes of its layers' keys.  Measured by a forward pass over one token.
_measured: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], list[torch.dtype]]] = WeakKeyDictionary()


class _Probe(DynamicCache):
    """Notes what keys and values it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[int, torch.dtype] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        # Under autocast keys that were rotated in float32 are rounded to what values are, when they are used.
        self.dtypes[layer_idx] = min(key_states.dtype, value_states.dtype, key=lambda dtype: dtype.itemsize)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _measured_dtype(model: nn.Module, layer: int, device: torch.device) -> torch.dtype:
    """The dtype of a layer's keys, by a forward pass over one token where it is not known."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    key = autocast, tuple({parameter.dtype: None for parameter in model.parameters()})
    known = _measured.setdefault(model, {})
    if key not in known:
        probe, inner = _Probe(), pretrained_model(model)
        # Under autocast the model may be running: a context that it brings must not be entered twice.
        call = forward_below(inner) if autocast else model
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.int64, device=inner.device)
            call(input_ids=token, past_key_values=probe, use_cache=True)
        if sorted(probe.dtypes) != list(range(len(probe.dtypes))) or not probe.dtypes:
            raise UnsupportedModel(
                f"{type(model).__name__} gave a cache KV of the layers {sorted(probe.dtypes)} in a pass over one token"
            )
        known[key] = [probe.dtypes[index] for index in range(len(probe.dtypes))]
        log.info("measured the keys of %s by a pass over one token: %s", type(model).__name__, set(known[key]))
    return known[key][layer]


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
