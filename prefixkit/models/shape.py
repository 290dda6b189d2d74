"""Head counts, sizes and types of a model's KV, as its layers make it."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from prefixkit.models.attention_class import original_class
from prefixkit.models.families import attention_layers, pretrained_model, text_config
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.probe.cache import LayerShape
from prefixkit.models.probe.passes import probe
from prefixkit.models.weights.state import plain_numbers
from prefixkit.ops.arguments import FLOATS
from prefixkit.ops.kv_pool import KVSpec

log = logging.getLogger("prefixkit")

# Of each model, by what may change it: what its probe has found.
_probed: WeakKeyDictionary[nn.Module, dict[object, list[LayerShape]]] = WeakKeyDictionary()


def kv_spec(model: nn.Module) -> KVSpec:
    """What a :class:`KVPool` must hold for ``model``, patched or not.

    Measured by a forward pass, so a tensor-parallel shard gets its own share, and quantised weights or autocast the
    dtype that keys really have; once for a model, and again after its modules, dtypes or devices have changed.

    Raises:
        UnsupportedModel: see :func:`attention_layers` and :func:`probe`; or the layers differ in shape, type or device.
    """
    layers = _layers(model)
    return KVSpec(len(layers), layers[0].kv_heads, layers[0].head_dim, layers[0].dtype, layers[0].device)


def query_heads(model: nn.Module) -> int:
    """Query heads of each attention layer of ``model``, as far as this process computes them.

    Raises:
        UnsupportedModel: see :func:`kv_spec`.
    """
    return _layers(model)[0].heads


def windows(model: nn.Module) -> list[int | None]:
    """The window of each attention layer, in tokens; None for a layer without.

    Masks of the model's own say so, which some families do not tell their attention functions.

    Raises:
        UnsupportedModel: see :func:`kv_spec`.
    """
    return [layer.window for layer in _layers(model)]


def counts_from_zero(model: nn.Module) -> bool:
    """Whether ``model``, called without position_ids, gives the first token position 0.

    Raises:
        UnsupportedModel: see :func:`kv_spec`.
    """
    return all(layer.counts_from_zero for layer in _layers(model))


def attention_shape(model: nn.Module) -> Hashable:
    """All that pools, plans and layers' variants are made by: while it is equal they serve the model.

    Raises:
        UnsupportedModel: see :func:`kv_spec`.
    """
    return tuple((layer, layer.window, layer.longest) for layer in _layers(model))


def longest_text(model: nn.Module) -> int | None:
    """Tokens of a text up to which attention in chunks is causal; None for any number.  Raises as :func:`kv_spec`."""
    return min((layer.longest for layer in _layers(model) if layer.longest is not None), default=None)


def _layers(model: nn.Module) -> list[LayerShape]:
    """What the attention layers of a model are like: all alike, but for their windows."""
    inner, layers = pretrained_model(model), attention_layers(model)
    key = _changeable(inner, list(layers.values()))
    known = _probed.setdefault(inner, {})
    if key not in known:
        found = probe(inner)
        _check_alike(inner, found)
        log.info("measured the attention layers of %s by passes over four tokens: %s", type(inner).__name__, found[0])
        known[key] = found
    return known[key]


def _check_alike(model: nn.Module, layers: list[LayerShape]) -> None:
    """Raise UnsupportedModel unless one pool holds the KV of all layers."""
    name = type(model).__name__
    if len(found := dict.fromkeys(layers)) > 1:
        raise UnsupportedModel(
            f"the layers of {name} differ in heads, head_dim, dtype or device, and a pool needs them equal: "
            f"{', '.join(map(str, found))}"
        )
    layer = layers[0]
    if layer.dtype not in FLOATS:
        raise UnsupportedModel(
            f"the keys of {name} are {layer.dtype}, and a tree holds {', '.join(map(str, FLOATS))}; convert the model, "
            "with model.float() for instance"
        )


def _changeable(model: PreTrainedModel, layers: list[nn.Module]) -> object:
    """What a model's KV may depend on: modules, tensors and numbers of attention, autocast, a forward of its own."""
    found: list[object] = [*plain_numbers(text_config(model))]
    for layer in layers:
        found += plain_numbers(layer)
        for module in layer.modules():
            parts = module.__dict__
            found.append(original_class(module))
            for tensor in (*parts["_parameters"].values(), *parts["_buffers"].values()):
                found.append(None if tensor is None else (tensor.dtype, tensor.device, tensor.shape))
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    return *autocast, model.config._attn_implementation, "forward" in model.__dict__, tuple(found)
