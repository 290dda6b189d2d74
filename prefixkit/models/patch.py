"""Patch a transformers model so that it reads a prefix tree, and unpatch it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from transformers import GenerationMixin

from prefixkit.models.attention_class import become, is_tree_class, original_class, patched_modules, tree_class
from prefixkit.models.compile.made import drop
from prefixkit.models.compile.packed_weights import unpack
from prefixkit.models.experts import expert_modules, experts_class
from prefixkit.models.families import attention_layers, pretrained_model
from prefixkit.models.generate.generating_class import (
    MODES,
    Mode,
    drop_mode,
    generating_class,
    set_mode,
    wrap_forward,
)
from prefixkit.models.own_attention.bodies import body_class, known_bodies
from prefixkit.models.states.mixer_class import mixer_class, mixers
from prefixkit.models.weights.content import COMPARE, SETTING, Compare

Model = TypeVar("Model", bound=nn.Module)


def patch(model: Model, *, tree_cache: Mode = "auto", compare_weights: Compare = "auto") -> Model:
    """Let ``model`` attend over prefix trees: for prefixkit's calls, and for its own ``generate``.

    Only the classes of the model, its attention modules and its experts change, to subclasses of themselves.
    Parameters, state dict, config, hooks and adapters stay, and with caches that are no trees the model computes
    exactly what it did before.

    Args:
        model: A transformers model whose attention layers follow transformers' attention interface, or a wrapper
            around one.  Patching it again changes ``tree_cache`` and ``compare_weights``, and drops the KV that
            ``generate`` keeps from call to call.
        tree_cache: When ``model.generate`` keeps its KV in a :class:`TreeCache`: ``"auto"`` where rows share prompt
            tokens, as with ``num_return_sequences`` and ``num_beams``, and on a GPU where its steps can replay CUDA
            graphs; ``"always"`` wherever it can; ``"never"`` unless it is given one as ``past_key_values``.
        compare_weights: What is compared before sessions and ``generate`` use KV of an earlier call, because torch
            does not count writes through ``tensor.data`` or a raw pointer: ``"auto"`` a sample of every tensor, and
            all weights where that costs little beside what the KV saves; ``"always"`` all weights, so that a write to
            a single element is seen too.

    Returns:
        The same model.

    Raises:
        UnsupportedModel: its layers do not follow that interface; nothing was changed.  What else must hold is
            measured at the first call, see :func:`kv_spec`.
        ValueError: ``tree_cache`` or ``compare_weights`` is none of these.
    """
    if tree_cache not in MODES:
        raise ValueError(f"tree_cache must be one of {', '.join(map(repr, MODES))}, got {tree_cache!r}")
    if compare_weights not in COMPARE:
        raise ValueError(f"compare_weights must be one of {', '.join(map(repr, COMPARE))}, got {compare_weights!r}")
    layers = [*attention_layers(model).values()]
    modules = [module for module in layers if not is_tree_class(type(module))]
    whole = pretrained_model(model)
    try:
        for module in modules:
            become(module, tree_class(type(module)))  # type: ignore[arg-type]  # classes hash
        for module in mixers(whole).values():
            if not is_tree_class(type(module)):
                modules.append(module)
                become(module, mixer_class(original_class(module)))  # type: ignore[arg-type]
        for module in known_bodies(whole.modules()):
            if not is_tree_class(type(module)):
                modules.append(module)
                become(module, body_class(type(module)))  # type: ignore[arg-type]
        for module in expert_modules(whole.modules()):
            if not is_tree_class(type(module)):
                modules.append(module)
                become(module, experts_class(type(module)))  # type: ignore[arg-type]
        if issubclass(original_class(whole), GenerationMixin):
            if not is_tree_class(type(whole)):
                modules.append(whole)
                become(whole, generating_class(type(whole)))  # type: ignore[arg-type]
            wrap_forward(whole)
            set_mode(whole, tree_cache)
        for module in (*layers, *mixers(whole).values()):
            module.__dict__[SETTING] = compare_weights
    except BaseException:
        _restore([module for module in modules if is_tree_class(type(module))])
        raise
    return model


def unpatch(model: Model) -> Model:
    """Undo :func:`patch` and leave no trace; a model that is not patched stays as it is.

    Weights that compiled layers have packed get memory of their own again: the same Parameter objects with the same
    values, dtype, device and ``requires_grad``.  At most those of q, k and v of one layer are in memory twice at once.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: expected a model, got {type(model).__name__}")
    _restore(patched_modules(model))
    unpack(model.parameters())  # also those that an earlier call could not unpack for want of memory
    return model


@contextmanager
def patched(model: Model) -> Iterator[Model]:
    """The model, patched for the length of a ``with`` block; layers that were patched before stay so."""
    before = set(patched_modules(model)) if isinstance(model, nn.Module) else set()
    patch(model)
    try:
        yield model
    finally:
        _restore([module for module in patched_modules(model) if module not in before])


def _restore(modules: list[nn.Module]) -> None:
    """Give modules their original classes, and their packed weights memory of their own; drop what was compiled."""
    drop(modules)
    for module in modules:
        become(module, original_class(module))
        module.__dict__.pop(SETTING, None)
        drop_mode(module)
    for module in modules:
        unpack(module.parameters())
