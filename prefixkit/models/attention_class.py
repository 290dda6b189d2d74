"""The replacement attention class, made from the original one.

Everything but the attention core stays the original's code: projections, norms and rotary embedding run as they are.
When a :class:`LayeredCache` arrives, the original ``forward`` runs on a shallow copy of the module, with the same
parameters, buffers and submodules, whose ``config`` names our attention function.  So nothing global changes, nothing
is written to the module, and an exception leaves no trace.  With any other cache the original ``forward`` runs on the
module itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from prefixkit.models.bound_forwards import ORIGINAL, subclass
from prefixkit.models.indexing.compressors import is_compressor
from prefixkit.models.indexing.indexers import is_indexer
from prefixkit.models.indexing.plain_layer import MASK_OF, add, compress, mask_of, select, set_selected
from prefixkit.models.layered_cache import LayerCache, LayeredCache
from prefixkit.models.own_attention.known import code_of
from prefixkit.models.requirements import CACHE, name_cache
from prefixkit.models.variants.layer_variants import LAYER_VARIANT, refuse_without_tree

NAME = "prefixkit"
# Layer numbers of attention modules whose own attribute does not tell them, because the model passes the number at each
# call (Zamba) or adds to it (HRM).
numbered_by_model: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_LAYER = "_prefixkit_layer"
# Attributes of modules.  Llama 4's SCALES scales queries by position in the batch; a tree uses positions in the tree.
SCALES = "attn_temperature_tuning"
WRAPPED = "_prefixkit_wrapped_forward"  # a model's own ``forward`` attribute, while a patch wraps it

# Keywords that do not change the result, and values that ask for what attention over a tree does anyway.  Any other
# keyword that is not None is refused, because ignoring it could change the result.
_NEUTRAL = {
    "position_ids",  # checked before the position embeddings were applied
    "cache_position",
    "use_cache",
    "logits_to_keep",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
}
_AGREED = {"is_causal": True, "output_attentions": False}


@functools.cache
def tree_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an attention class that also accepts a :class:`LayeredCache`; one subclass per original class.

    It has the original's name and module, because transformers searches the source of a class's module, and users read
    class names in ``print(model)``.
    """

    # The original forward is looked up at each call: a forward that the class is given later takes effect, as it does
    # on a model that is not patched.
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = cache_among(args, kwargs)
        if cache is None:
            if LAYER_VARIANT in self.__dict__:
                refuse_without_tree(self)
            return original.forward(self, *args, **kwargs)
        return (not_traced if torch.compiler.is_compiling() else on_tree)(self, cache, args, kwargs)

    def on_tree(self: nn.Module, cache: LayeredCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_on(cache.layer(self, kwargs.get("position_ids")), self, cache, args, kwargs)

    # If the user has compiled the layer, tracing this call would recompile it at each step, as the cache changes.
    not_traced = torch.compiler.disable(on_tree)  # type: ignore[no-untyped-call]
    return subclass(original, tree_class, {"forward": forward})


def run_on(layer: LayerCache, module: nn.Module, cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of an attention module that was called with ``cache``, computed with ``layer`` as its cache."""
    original = original_class(module)
    own = code_of(original)  # type: ignore[arg-type]  # classes hash
    if own.adapt is not None:
        layer = own.adapt(layer)
    args = tuple([layer if value is cache else value for value in args])
    kwargs = {name: layer if value is cache else value for name, value in kwargs.items()}
    if own.forward is not None:
        return own.forward(module, *args, **name_cache(kwargs))
    copy = shallow_copy(module, original, layer)
    if own.core is not None:
        copy.__dict__["_attn"] = functools.partial(own.core, copy, layer)
    return original.forward(copy, *args, **kwargs)


def layer_number(module: nn.Module) -> int:
    """The layer number of an attention module, read from the attribute in which its class stores it, if it does: the
    layer of the cache for which the module stores KV, or the first of several.
    """
    number: int | None = module.__dict__.get(code_of(original_class(module)).index)  # type: ignore[arg-type]
    if numbered_by_model:  # in few programs
        number = numbered_by_model.get(module, number)
    assert number is not None, "of an attention module"
    return number


def number_by_model(module: nn.Module, number: int) -> None:
    """Set the layer number of an attention module whose own attribute does not tell it."""
    numbered_by_model[module] = number


def cached_by(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a pool, ``[rows, kv_heads, length, head_dim]``, as an attention module's class caches them."""
    own = code_of(original_class(module))  # type: ignore[arg-type]
    return (key, value) if own.restore is None else own.restore(module, key, value)


def cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayeredCache | None:
    """The cache that a module was called with, if it is one of ours."""
    given = kwargs.get(CACHE)
    if isinstance(given, LayeredCache):
        return given
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, LayeredCache)), None)


def is_tree_class(cls: type) -> bool:
    """Whether :func:`subclass` made ``cls``."""
    return ORIGINAL in cls.__dict__


def patched_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that are patched."""
    return [module for module in model.modules() if is_tree_class(type(module))]


def accepts_trees(model: nn.Module) -> bool:
    """Whether a model's class or one of its base classes is patched: wrappers such as FSDP make subclasses."""
    return any(map(is_tree_class, type(model).__mro__))


def forward_below(model: nn.Module) -> Callable[..., Any]:
    """The model's ``forward`` that the patch wraps: it does not handle trees."""
    wrapped: Callable[..., Any] | None = model.__dict__.get(WRAPPED)
    below = next((cls.__dict__[ORIGINAL] for cls in type(model).__mro__ if is_tree_class(cls)), type(model))
    return functools.partial(below.forward, model) if wrapped is None else wrapped


def is_patched(model: object) -> bool:
    """Whether any attention layer of ``model`` is patched; False also for an object that is no model."""
    return isinstance(model, nn.Module) and bool(patched_modules(model))


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module has without the patch."""
    original: type[nn.Module] = type(module).__dict__.get(ORIGINAL, type(module))
    return original


def argument_names(model: nn.Module) -> Container[str]:
    """The names of the arguments of a model's own ``forward``."""
    return inspect.signature(original_class(model).forward).parameters


def shallow_copy(module: nn.Module, original: type[nn.Module], layer: LayerCache) -> nn.Module:
    """A shallow copy of an attention module, of the original class, that attends by ``layer``."""
    copy: nn.Module = object.__new__(original)
    copy.__dict__.update(module.__dict__)
    if "config" in copy.__dict__:
        copy.__dict__["config"] = _TreeConfig(module.__dict__["config"])
    copy.__dict__[_LAYER] = layer
    if SCALES in copy.__dict__:
        copy.__dict__[SCALES] = False
    for name, part in module.__dict__["_modules"].items():
        if (replacement := _replacement_of(type(part))) is not None:  # type: ignore[arg-type]  # classes hash
            # An attribute of the instance is found before a submodule of that name.
            copy.__dict__[name] = functools.partial(replacement, layer, part)
    if _makes_mask(original):  # type: ignore[arg-type]
        copy.__dict__[MASK_OF] = functools.partial(mask_of, layer, getattr(module, MASK_OF))
    return copy


@functools.cache
def _replacement_of(cls: type) -> Callable[..., Any] | None:
    """The function that the copy of an attention module calls in place of a submodule of this class, or None."""
    if not issubclass(cls, nn.Module):
        return None  # where there is no submodule
    if is_compressor(cls):  # type: ignore[arg-type]  # classes hash
        return compress
    return select if is_indexer(cls) else None  # type: ignore[arg-type]


@functools.cache
def _makes_mask(cls: type[nn.Module]) -> bool:
    return hasattr(cls, MASK_OF)


class _TreeConfig:
    """A model's config except for the name of the attention function."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered as ``"prefixkit"``: attention over the tree, for copies of patched layers.

    Args:
        query: ``[1, heads, T, head_dim]``, rotated.
        key, value: ``[1, kv_heads, T, head_dim]``; already in the pool.
        attention_mask: The empty mask of ``StepCache.inputs()``.
        scaling: The factor on query times key.
        dropout: Must be 0.
        sliding_window: Tokens that a query sees, itself included; None for all.
        softcap: Bound on the scores, ``softcap * tanh(score / softcap)``; None for none.
        s_aux: ``[heads]`` logits that join the softmax's denominator; None for none.
        indices: ``[1, T, k]`` the tokens that an indexer has selected for each row; None: a row sees all.
        position_bias: ``[1, heads, T, positions]`` the bias added to the scores; None for none.
        sinks: ``[1, heads, T, 1]`` logits of each row that join the softmax's denominator; None for none.
        **kwargs: Other keywords of the family; each must be known not to change the result.

    Returns:
        ``[1, T, heads, head_dim]`` in the query's dtype, and None in place of the weights.

    Raises:
        ValueError: an argument asks for something that attention over a tree does not compute.
    """
    layer: LayerCache | None = module.__dict__.get(_LAYER)
    if layer is None:
        _refuse_global_use()
    layer.check(key, value, attention_mask)
    scale = _scale(module, scaling, dropout, kwargs)
    if indices is not None:
        set_selected(layer, indices)
    if position_bias is not None:
        add(layer, position_bias)
    if sinks is not None:
        if s_aux is not None or sinks.shape != (1, *query.shape[1:3], 1):
            raise ValueError(f"{type(module).__name__} passed sinks of shape {list(sinks.shape)}, or two kinds of them")
        s_aux = sinks[0, :, :, 0].transpose(0, 1)
    return layer.attend(query, scale, sliding_window, softcap, s_aux), None


def _scale(module: nn.Module, scaling: float | None, dropout: float, others: dict[str, Any]) -> float:
    """The scaling, after a check that no argument would be ignored."""
    name = type(module).__name__
    if dropout:
        raise ValueError(
            f"{name} asked for attention dropout {dropout}, which a tree does not have; call model.eval() first"
        )
    if scaling is None:
        raise ValueError(f"{name} passed no scaling, and the factor on query times key cannot be guessed")
    unknown = {
        keyword: value
        for keyword, value in others.items()
        if value is not None and keyword not in _NEUTRAL and not (keyword in _AGREED and value is _AGREED[keyword])
    }
    if unknown:
        given = ", ".join(f"{keyword} ({type(value).__name__})" for keyword, value in sorted(unknown.items()))
        raise ValueError(f"{name} passed {given} to its attention function; attention over a tree would ignore it")
    return float(scaling)


def _refuse_global_use(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "attn_implementation='prefixkit' cannot be set on a model: attention over a tree needs the cache, which "
        "attention functions never see. Leave attn_implementation as it was and call prefixkit.patch(model)"
    )


AttentionInterface.register(NAME, tree_attention_forward)
# Transformers calls this function to make a mask; without a registered mask function it would drop the mask silently.
AttentionMaskInterface.register(NAME, _refuse_global_use)
