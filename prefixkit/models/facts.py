"""Facts about a model at the beginning of a call: read in one pass over its modules, and passed down.

The probe measures how attention layers compute, once per model, and again when something that they may depend on has
changed: modules, dtypes, devices, numbers in attention modules and in the config, autocast.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from prefixkit.attention.rotation import Rotation
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.spans import LooksAhead
from prefixkit.attention.variants import Variant
from prefixkit.attention.visible import ALL
from prefixkit.kv.held import Held, held_of
from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.layer_kinds import CachedTensor, LayerKind, PlanKind
from prefixkit.models.attention_class import is_tree_class, layer_number, numbered_by_model, original_class
from prefixkit.models.device_map import check_storage
from prefixkit.models.families import attention_index, attention_layers, body_of, pretrained_model
from prefixkit.models.indexing.compressors import is_compressor
from prefixkit.models.indexing.indexers import is_indexer
from prefixkit.models.kv_dtype import KVDtype, kv_dtype_of, with_kv_dtype
from prefixkit.models.model_calls import no_lm_head
from prefixkit.models.model_errors import NotPatched, UnsupportedVariant
from prefixkit.models.own_attention.known import own_code
from prefixkit.models.probe.measured import Probed
from prefixkit.models.probe.passes import SCALES_FROM, probe
from prefixkit.models.probe.rotations import measure_rotations
from prefixkit.models.states.mixer_class import is_mixer, mixers
from prefixkit.models.tensor_parallel import tp_size
from prefixkit.models.variants.layer_variants import LAYER_VARIANT, with_variants
from prefixkit.models.weights.state import ModelState, plain_numbers, state_of

log = logging.getLogger("prefixkit")

# The plan kind of a model whose layers all keep states: its steps have a plan, and no layer attends.
_NO_ATTENTION = PlanKind(HeadShape(1, 1, 64, 2), ALL, expands=False, device=torch.device("cpu"))

# Per model, and per key of what these depend on: the result of its probe, and how position rotates its queries.
_probed: WeakKeyDictionary[nn.Module, dict[object, Probed]] = WeakKeyDictionary()
_rotations: WeakKeyDictionary[nn.Module, dict[object, tuple[Rotation | None, ...]]] = WeakKeyDictionary()
# Per model: the last signature that alone determines the result of its probe, and that result.
_latest: WeakKeyDictionary[nn.Module, tuple[object, Probed]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """A model as it is at the beginning of a call; made by :func:`facts_of`, and dropped after the call.

    Attributes:
        model: The model that the caller passed, which may be a wrapper.
        inner: The outermost transformers model in it.
        state: The modules, tensors and settings that ``inner`` computes with.
    """

    model: nn.Module
    inner: PreTrainedModel
    state: ModelState

    @cached_property
    def outer(self) -> Hashable:
        """The hooks, and the functions set as ``forward``, of the modules that wrap the transformers model."""
        found, left = list[Hashable](), [self.model]
        for module in left:  # the list grows while it is read
            if module is self.inner:
                continue
            left += module.children()
            found += [*module._forward_pre_hooks, *module._forward_hooks]
            if (forward := module.__dict__.get("forward")) is not None:
                found.append(getattr(forward, "__func__", forward))
        return tuple(found)

    @property
    def patched(self) -> bool:
        """Whether any module of the model is patched."""
        return any(map(is_tree_class, set(map(type, self.state.modules))))

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The config of the model's text part."""
        return self.inner.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Columns of the model's logits."""
        return int(self.config.vocab_size)

    def check_lm_head(self) -> None:
        """Raise TypeError for a model that returns only hidden states, as reward models do, where logits are needed."""
        if not self.inner.can_generate():
            raise TypeError(no_lm_head(self.inner))

    @property
    def generation_config(self) -> Any:
        """The generation config of the model, or else that of the transformers model in it; None if neither has one."""
        return getattr(self.model, "generation_config", None) or getattr(self.inner, "generation_config", None)

    @cached_property
    def probed(self) -> Probed:
        """What the probe has measured of the model's layers.

        Raises:
            UnsupportedModel: see :func:`attention_layers`, :func:`probe` and :func:`check_storage`.
        """
        signature = _signature(self)
        if signature is not None and (latest := _latest.get(self.inner)) is not None and latest[0] == signature:
            return latest[1]
        found, layers = self._look_up()
        if signature is not None and all(map(_is_in_state, layers)):
            _latest[self.inner] = signature, found
        return found

    def _look_up(self) -> tuple[Probed, list[nn.Module]]:
        """The result of the probe for the layers in their present state, cached or measured now; and the layers."""
        layers = self._attention()
        key, known = _changeable(self, layers), _probed.setdefault(self.inner, {})
        if key in known and not any("forward" in layer.__dict__ for layer in layers):
            return known[key], layers
        attention_layers(self.inner)  # checks anew what wraps the layers' forward methods
        if key not in known:
            found = probe(self.inner)
            check_storage(self.inner, found)
            name = type(self.inner).__name__
            kinds = [*map(str, found.layers), *(f"states {', '.join(map(str, of))}" for of in found.states)]
            said = "; ".join(dict.fromkeys(kinds))
            log.info("measured the layers of %s by passes over four tokens: %s", name, said)
            if any(kind.expands and not kind.absorbs and kind.selects is None for kind in found.layers):
                log.info("K and V are made of all latents that a step reads: in some layers of %s not linearly", name)
            known[key] = found
        return known[key], layers

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each attention layer, including its variant and the dtype in which pages hold its K and V;
        raises as :attr:`probed`, :meth:`with_variants` and :func:`with_kv_dtype`.
        """
        return with_kv_dtype(self.with_variants(self.variants), self.kv_dtype, type(self.inner).__name__)

    @property
    def kv_dtype(self) -> KVDtype | None:
        """The dtype in which pages hold K and V, if it differs from the model's; else None."""
        return kv_dtype_of(self.state.modules)

    @cached_property
    def variants(self) -> dict[int, Variant]:
        """The variants that users have given to attention layers, by layer number."""
        found = [module for module in self.state.modules if LAYER_VARIANT in module.__dict__]
        if found:
            _ = self.probed  # numbers modules that do not store their number, of a copy of a model too
        return {layer_number(module): module.__dict__[LAYER_VARIANT] for module in found}

    @property
    def looks_ahead(self) -> tuple[LooksAhead, ...]:
        """The layers' variants under which tokens see later tokens."""
        found = [
            LooksAhead(kind.variant, kind.heads, kind.device)
            for kind in self.layers
            if kind.variant is not None and kind.variant.looks_ahead
        ]
        return tuple(dict.fromkeys(found))

    def with_variants(self, variants: Mapping[int, Variant]) -> tuple[LayerKind, ...]:
        """The kinds of the attention layers if they had these variants, by layer number.

        Raises:
            UnsupportedVariant: a layer cannot apply its variant.
            UnsupportedModel: as :attr:`probed`.
        """
        kinds = self.probed.layers
        if not variants:
            return kinds
        processes = tp_size(self.inner)
        if processes > 1 and any(variant.reads("h") or variant.transforms for variant in variants.values()):
            raise UnsupportedVariant(
                f"{type(self.inner).__name__} is split over {processes} processes, each of which numbers its own heads "
                "from 0, and the variant reads h, or transforms heads; load the model without tensor parallelism"
            )
        if self.probed.states and any(variant.looks_ahead for variant in variants.values()):
            raise UnsupportedVariant(
                f"under the variant tokens see later ones, and layers of {type(self.inner).__name__} keep states, "
                "which go from token to token; take one that is causal"
            )
        classes = {attention_index(module): original_class(module) for module in self.state.modules}
        by_number = {number: cls for number, cls in classes.items() if number is not None}
        numbers = self.probed.computed_by or self.probed.numbers or range(len(kinds))
        return with_variants(kinds, numbers, by_number, variants, lambda: self.rotations)

    @property
    def rotations(self) -> tuple[Rotation | None, ...]:
        """How position rotates the queries of each attention layer; raises as :func:`measure_rotations`."""
        key, known = _changeable(self, self._attention()), _rotations.setdefault(self.inner, {})
        if key not in known:
            known.clear()
            known[key] = measure_rotations(self.inner, self.probed.layers)
        return known[key]

    @property
    def held(self) -> Held | None:
        """The KV that growing sequences must retain; None: all of it."""
        return held_of(self.layers)

    @cached_property
    def spec(self) -> KVSpec:
        """What a :class:`KVPool` must hold for the model; raises as :attr:`probed`."""
        states, places = self.probed.states, self.probed.state_devices
        if not self.layers:  # a tree numbers tokens by the slots of pages, so each token caches one element
            return KVSpec(((CachedTensor(1, 1),),), torch.bfloat16, places[0], states, state_devices=places)
        layer, caching = self.layers[0], [kind for kind in self.layers if kind.cached]
        cached, devices = tuple(kind.cached for kind in caching), tuple(kind.device for kind in caching)
        computed = layer.dtype if layer.stored else None
        return KVSpec(cached, layer.stored or layer.dtype, layer.device, states, computed, devices, places)

    @property
    def plan_kinds(self) -> tuple[PlanKind, ...]:
        """The kinds for which a step makes a plan each, in the order of the first layer of each kind."""
        found = tuple(dict.fromkeys(kind for layer in self.layers for kind in layer.plan_kinds))
        return found or (replace(_NO_ATTENTION, device=self.spec.device),)

    @property
    def is_spread(self) -> bool:
        """Whether the model's weights lie on several devices."""
        return self.probed.is_spread

    @property
    def mixers(self) -> list[nn.Module]:
        """The modules that keep a state in place of KV, in the order of ``spec.states``: each as often as it runs."""
        found = [*mixers(self.inner).values()] if self.spec.states else []
        calls = self.probed.state_calls or (1,) * len(found)
        return [module for module, times in zip(found, calls, strict=True) for _ in range(times)]

    @cached_property
    def body(self) -> nn.Module:
        """The module that computes the last hidden states, which are a head's input."""
        return body_of(self.inner)

    @property
    def counts_from_zero(self) -> bool:
        """Whether the model, called without position_ids, gives the first token position 0."""
        return self.probed.counts_from_zero

    @property
    def scales_from(self) -> int | None:
        """The first position whose queries the model scales by their index in the batch, padding included."""
        found = [math.ceil(kind.temperature[0]) - 1 for kind in self.layers if kind.temperature is not None]
        if self.probed.scales_padded:
            found.append(int(getattr(self.config, SCALES_FROM, None) or 0))
        return min(found, default=None)

    def _attention(self) -> list[nn.Module]:
        """The modules that :func:`attention_layers` finds, in its order, and those that keep a state."""
        indices = {module: attention_index(module) for module in dict.fromkeys(self.state.modules)}
        found = [(index, module) for module, index in indices.items() if index is not None]
        states = [module for module in indices if is_mixer(module)]
        return [*(module for _, module in sorted(found, key=operator.itemgetter(0))), *states]


def facts_of(model: object) -> ModelFacts:
    """The facts of a model; UnsupportedModel if it contains no transformers model."""
    inner = pretrained_model(model)
    assert isinstance(model, nn.Module), "checked"
    return ModelFacts(model, inner, state_of(inner))


def patched_facts(model: object) -> ModelFacts:
    """The facts of a patched model; NotPatched for a model that is not patched, or an object that is no model."""
    if not isinstance(model, nn.Module):
        raise NotPatched(f"model must be a model that prefixkit.patch returned, got {type(model).__name__}")
    facts = facts_of(model)
    if not facts.patched:
        raise NotPatched(f"{type(model).__name__} is not patched; call model = prefixkit.patch(model) first")
    return facts


def kv_spec(model: object) -> KVSpec:
    """What a :class:`KVPool` must hold for ``model``, patched or not; UnsupportedModel as :attr:`ModelFacts.layers`.

    A forward pass measures it, so the KVSpec of a tensor-parallel shard counts its own heads, and under quantised
    weights or autocast it has the dtype of the keys as computed.
    """
    return facts_of(model).spec


def _signature(facts: ModelFacts) -> object:
    """All that is read of a model's modules; None if functions replace their ``forward``.

    While the signature is unchanged, single layers need not be read, which takes as long as reading the signature.
    """
    state, inner = facts.state, facts.inner
    if state.forwards:
        return None
    tensors = [(tensor.dtype, tensor.device, tensor.shape) for tensor in state.tensors]
    others = *plain_numbers(facts.config), inner.config._attn_implementation
    return list(map(type, state.modules)), state.modes, tensors, others


def _is_in_state(layer: nn.Module) -> bool:
    """Whether a model's state includes a layer's number, and the probe depends on no function of the layer's class."""
    return layer not in numbered_by_model and own_code(original_class(layer)) is None  # type: ignore[arg-type]


def _changeable(facts: ModelFacts, layers: list[nn.Module]) -> object:
    """What a model's KV may depend on: modules, tensors and numbers of attention, autocast, a replaced ``forward``."""
    found: list[object] = [*plain_numbers(facts.config)]
    for layer in layers:
        found += plain_numbers(layer)
        if own_code(cls := original_class(layer)) is not None:  # type: ignore[arg-type]  # its own code was compared
            found += [cls.forward, getattr(cls, "_attn", None)]
        inside: list[nn.Module | None] = [layer]
        for module in inside:  # the list grows while it is read
            if module is None:
                continue
            parts = module.__dict__
            inside += parts["_modules"].values()
            found.append(cls := original_class(module))
            if is_indexer(cls) or is_compressor(cls):  # type: ignore[arg-type]  # classes hash
                found += plain_numbers(module)
            for tensor in (*parts["_parameters"].values(), *parts["_buffers"].values()):
                found.append(None if tensor is None else (tensor.dtype, tensor.device, tensor.shape))
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    inner = facts.inner
    return *autocast, inner.config._attn_implementation, "forward" in inner.__dict__, tuple(found)


def warn_of_moving_rotary(model: PreTrainedModel) -> None:
    """Warn if the model has a rotary embedding that depends on the longest position of a forward pass."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    # One dict, or one for each type of layer.
    kinds = {str(part.get("rope_type")) for part in (parameters, *parameters.values()) if isinstance(part, dict)}
    if moving := kinds & {"dynamic", "longrope"}:
        log.warning(
            "rotary embedding %s depends on the longest position in a forward pass: beyond the original context, a "
            "sequence's result depends on what else runs in its step",
            ", ".join(sorted(moving)),
        )
