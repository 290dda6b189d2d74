"""Patch a transformers model so that it reads a prefix tree, and unpatch it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import GenerationMixin

from prefixkit.attention.variants import Variant
from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.models.attention_class import (
    is_tree_class,
    layer_number,
    original_class,
    patched_modules,
    tree_class,
)
from prefixkit.models.bound_forwards import become
from prefixkit.models.compile.made import drop
from prefixkit.models.compile.packed_weights import unpack
from prefixkit.models.experts import expert_modules, experts_class
from prefixkit.models.facts import facts_of
from prefixkit.models.families import attention_layers, pretrained_model
from prefixkit.models.generate.generating_class import (
    MODES,
    Mode,
    drop_mode,
    generating_class,
    set_mode,
    wrap_forward,
)
from prefixkit.models.kv_dtype import KV_BITS, KVDtype, check_kv_dtype, set_kv_dtype, with_kv_dtype
from prefixkit.models.own_attention.bodies import body_class, known_bodies
from prefixkit.models.states.mixer_class import mixer_class, mixers
from prefixkit.models.states.norms import norm_modules, norms_class
from prefixkit.models.tensor_parallel import check_split
from prefixkit.models.variants.layer_variants import (
    LAYER_VARIANT,
    LayerVariants,
    chosen_variants,
    set_variants,
    variants_text,
)
from prefixkit.models.weights.content import COMPARE, SETTING, Compare

log = logging.getLogger("prefixkit")

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    *,
    tree_cache: Mode = "auto",
    compare_weights: Compare = "auto",
    variant: LayerVariants | None = None,
    kv_dtype: KVDtype | None = None,
) -> Model:
    """Let ``model`` attend over prefix trees: for prefixkit's calls, and for its own ``generate``.

    Only the classes of the model, its attention modules, its experts and the norms of a model with states change, to
    subclasses of themselves.
    Parameters, state dict, config, hooks and adapters stay as they are, and with other caches than a tree the model
    computes exactly what it did before.

    A layer with a ``variant`` computes ``score = scale * q . k``, then applies its own bias, such as ALiBi, and its own
    cap, and then the variant's ``score_mod``.  A key is visible if the layer's own mask, window and chunk and the
    variant's ``mask_mod`` all show it.  The layer's own sinks are added to the softmax's denominator at the end.  So
    the variant takes the place of a mask that the caller of transformers passes, which eager attention and
    FlexAttention add to the scores that the layer would give to the softmax.  The layers' own positions (rotary
    embedding) stay.  Without a tree, as in training or in a plain call, such a layer raises an error, because it would
    run without its variant.

    Under a variant whose mask shows later tokens, tokens of a prompt see those later tokens of the prompt that the mask
    shows; generated and scored tokens are seen by no token before them.  Tokens that see one another are computed
    in one step, and a ``prefill_chunk`` below their number is an error.  Texts share their KV only if they agree up to
    the last of these tokens.  A layer's own window or chunk then hides only tokens before a query.

    A variant's functions of whole rows run on queries and keys after the layer's rotary embedding, on values as the
    layer caches them, and on outputs before the layer's output projection.  Under
    :func:`prefixkit.variants.streaming_llm` queries attend at positions in the cache: ``patch`` measures how each layer
    rotates its queries by position, and KV of samples that no layer sees any more is freed.

    KV of other variants is never used: patching with another variant invalidates the KV of sessions, ``generate`` and
    pins, and prefix files name their variant.  Tensors and numbers that the variant's functions capture count as
    weights: a call notices that they have changed in place (``compare_weights``), and computes KV again.

    Args:
        model: A transformers model whose attention layers follow transformers' attention interface, or a wrapper around
            one.  Patching it again changes all settings, and drops the KV that ``generate`` retains from call to call.
        tree_cache: When ``model.generate`` uses a :class:`TreeCache`: ``"auto"`` where rows share prompt tokens, as
            with ``num_return_sequences`` and ``num_beams``, and on a GPU where steps can replay CUDA graphs;
            ``"always"`` wherever a tree can be used; ``"never"`` unless the caller passes one as the cache.
        compare_weights: What is compared before sessions and ``generate`` use KV of an earlier call, because torch does
            not count writes through ``tensor.data`` or a raw pointer: ``"auto"`` compares a sample of every tensor, and
            all weights where that takes little time relative to what the KV saves; ``"always"`` compares all weights,
            so that a write to a single element is noticed too.
        variant: A variant that attention layers apply in addition to their own attention: one
            :class:`prefixkit.Variant` for all attention layers; a mapping from layer numbers (indices of the model's
            list of layers) to variants; or a function from a layer number to a variant or None.  A layer that a looped
            model runs several times has one number.  None: no variant; an earlier one is removed.
        kv_dtype: ``"fp8"``: pages hold K and V in e4m3 (4 significant bits; numbers beyond 448 become 448), in half the
            memory of 16 bits, and attention computes in the model's dtype as before.  Results then differ from the
            model's: docs/howto/memory.md gives the error, and what kernels support.  None: the model's dtype.

    Returns:
        The same model.

    Raises:
        UnsupportedModel: its layers do not follow that interface, or it is split over processes in another way than
            tensor parallelism with equal numbers of heads; nothing was changed.  Other requirements are measured at
            prefixkit's first call, which then raises this error.  With a ``variant`` or a ``kv_dtype`` they are
            measured by ``patch``; ``kv_dtype`` also requires layers that cache only K and V.
        UnsupportedVariant: a layer cannot apply its variant, because the variant reads ``b``, an indexer selects the
            layer's tokens, it attends to compressed tokens, its heads are in another order (DiffLlama, JetMoE), it is
            split over processes, or its keys do not suit a transform or positions in the cache; or a layer number is
            not that of an attention layer; nothing was changed.
        ValueError: ``tree_cache``, ``compare_weights`` or ``kv_dtype`` has another value.
        TypeError: ``variant`` is of another type, or its functions capture an object whose content cannot be compared.
    """
    if tree_cache not in MODES:
        raise ValueError(f"tree_cache must be one of {', '.join(map(repr, MODES))}, got {tree_cache!r}")
    if compare_weights not in COMPARE:
        raise ValueError(f"compare_weights must be one of {', '.join(map(repr, COMPARE))}, got {compare_weights!r}")
    check_kv_dtype(kv_dtype)
    whole, layers = pretrained_model(model), [*attention_layers(model).values()]
    check_split(whole)
    by_number = {layer_number(module): module for module in layers}
    if variants := chosen_variants(variant, [*by_number]):
        kinds = facts_of(model).with_variants(variants)  # or raise
    if kv_dtype:
        with_kv_dtype(facts_of(model).probed.layers, kv_dtype, type(whole).__name__)  # or raise
    modules = [module for module in layers if not is_tree_class(type(module))]
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
        for module, norm in norm_modules(whole.modules() if mixers(whole) else ()).items():
            if not is_tree_class(type(module)):
                modules.append(module)
                become(module, norms_class(type(module), norm))  # type: ignore[arg-type]
        for module in expert_modules(whole.modules()):
            if not is_tree_class(type(module)):
                modules.append(module)
                become(module, experts_class(type(module)))  # type: ignore[arg-type]
        if issubclass(original_class(whole), GenerationMixin):
            if not is_tree_class(type(whole)):
                modules.append(whole)
                become(whole, generating_class(type(whole)))  # type: ignore[arg-type]
            wrap_forward(whole)
            set_mode(whole, tree_cache, bool(variants))
        for module in (*layers, *mixers(whole).values()):
            module.__dict__[SETTING] = compare_weights
        if set_kv_dtype(layers, kv_dtype):
            drop(patched_modules(whole))
            log.info("pages hold K and V in %s", kv_dtype or "the model's dtype")
        if set_variants(by_number, variants):
            drop(patched_modules(whole))  # compiled layers still apply the earlier variants
            _log_variants(variants, kinds if variants else ())
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
    """Patch the model within a ``with`` block; layers that were patched before stay patched."""
    before = set(patched_modules(model)) if isinstance(model, nn.Module) else set()
    kept: dict[str, Any] = {}
    if before:
        facts = facts_of(model)
        kept = {"variant": facts.variants, "kv_dtype": facts.kv_dtype}
    patch(model, **kept)
    try:
        yield model
    finally:
        _restore([module for module in patched_modules(model) if module not in before])


def _log_variants(variants: Mapping[int, Variant], kinds: Sequence[LayerKind]) -> None:
    """Log which variants layers apply from now on, and where plain torch computes them."""
    log.info("attention applies %s", variants_text(variants) or "no variant")
    if any(kind.variant is not None and kind.expands for kind in kinds):
        log.info("K and V are made of all latents that a step reads, in plain torch: variants change scores of these")


def _restore(modules: list[nn.Module]) -> None:
    """Give modules their original classes, and their packed weights memory of their own; drop what was compiled."""
    drop(modules)
    for module in modules:
        become(module, original_class(module))
        module.__dict__.pop(SETTING, None)
        module.__dict__.pop(LAYER_VARIANT, None)
        module.__dict__.pop(KV_BITS, None)
        drop_mode(module)
    for module in modules:
        unpack(module.parameters())
