"""Which models prefixkit understands, and where their attention layers are.

An attention class is understood by what it does, whatever its family: it gives its keys and values to a cache's
``update``, and then calls the function that transformers' attention interface finds by name.  Some classes with code of
their own are known by name; see ``own_attention/``.  What else must hold is measured by a probe; see ``probe/``.
"""

from __future__ import annotations

import functools
import inspect
import operator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from prefixkit.models.attention_class import number_by_model, numbered_by_model, original_class
from prefixkit.models.bound_forwards import is_own_forward
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.own_attention.known import own_code
from prefixkit.models.probe.idle_modules import idle_modules
from prefixkit.models.probe.stored_layers import stored_layers
from prefixkit.models.states.mixer_class import mixers

# Names in the code of an attention class that follows the interface.
_INTERFACE = {"update", "ALL_ATTENTION_FUNCTIONS", "get_interface"}


def attention_layers(model: object) -> dict[str, nn.Module]:
    """The attention modules of a supported model, patched or not, by name and in the order of their layer numbers.

    If some modules attend otherwise than a decoder's layers, modules that do not run when the model computes text are
    left out.  Modules that store the same ``layer_idx`` may be stacks of a looped model, which runs them several times,
    for a layer of the cache each: then the number of a module is the first of these.

    Raises:
        UnsupportedModel: ``model`` is no transformers model, or has layers that do not follow the attention interface,
            are in another order, or are wrapped so that a patch would not reach them.
    """
    pretrained = pretrained_model(model)
    if getattr(pretrained.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{_of(pretrained)} is an encoder-decoder; prefixkit runs decoders alone")
    found: list[tuple[int, str, nn.Module]] = []
    for name, module in pretrained.named_modules():
        _note_number(name, module)
        if (index := attention_index(module)) is not None:
            stored = getattr(module, "layer_idx", None)
            found.append((stored if isinstance(stored, int) and stored >= 0 else index, name, module))
    found.sort(key=operator.itemgetter(0))
    if len({index for index, _, _ in found}) < len(found) or not all(_is_causal(module) for _, _, module in found):
        idle = idle_modules(pretrained, [module for _, _, module in found])
        found = [one for one in found if one[2] not in idle]
    for _, name, module in found:
        _check_layer(name, module)
    if (renumbered := _renumbered(pretrained, found)) is None:
        _check_order(pretrained, found)
    return {name: module for _, name, module in renumbered or found}


def pretrained_model(model: object) -> PreTrainedModel:
    """The outermost transformers model in ``model``, which may be a wrapper around it; UnsupportedModel without one."""
    if isinstance(model, PreTrainedModel):
        return model
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedModel(
        f"expected a transformers causal language model, got {type(model).__name__}, which holds none; "
        "load one, for example by AutoModelForCausalLM.from_pretrained(name)"
    )


def text_config(model: object) -> PreTrainedConfig:
    """The config of the text part of a model, or of the transformers model in a wrapper."""
    return pretrained_model(model).config.get_text_config()


def body_of(model: PreTrainedModel) -> nn.Module:
    """The part of a supported model that computes its last hidden states."""
    body = model.base_model
    if body is not model or not model.can_generate():
        return body
    # Llama 4 and some others name a body that they lack: take the innermost model that holds their layers.
    layer = next(iter((attention_layers(model) or mixers(model)).values()))
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return next(one for one in reversed(models) if any(module is layer for module in one.modules()))


def known_positions(model: object) -> int:
    """A number of positions that the model certainly supports."""
    config = text_config(model)
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    return next((int(known) for known in named if isinstance(known, int)), 2048)


def attention_index(module: nn.Module) -> int | None:
    """The layer number of an attention module that follows the interface or has known code of its own; else None."""
    cls = original_class(module)
    if (own := own_code(cls)) is not None:  # type: ignore[arg-type]  # classes hash
        return module.__dict__.get(own.index)
    if not _follows_interface(cls):  # type: ignore[arg-type]  # cached by class; few modules get further
        return None
    index = numbered_by_model.get(module, getattr(module, "layer_idx", None))
    return index if isinstance(index, int) else None


def _note_number(name: str, module: nn.Module) -> None:
    """Note the layer number of an attention module that does not store it: its index in the list of layers."""
    if getattr(module, "layer_idx", 0) in (None, -1) and _follows_interface(original_class(module)):  # type: ignore[arg-type]
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if numbers:
            number_by_model(module, numbers[0])


def _renumbered(
    pretrained: PreTrainedModel, found: list[tuple[int, str, nn.Module]]
) -> list[tuple[int, str, nn.Module]] | None:
    """Modules of which some store the same number, by the layer of the cache that each stores KV for first; None unless
    each layer of the cache is stored for once.
    """
    if len({index for index, _, _ in found}) == len(found):
        return None
    stored = stored_layers(pretrained, [module for _, _, module in found])
    layers = sorted(layer for of in stored.values() for layer in of)
    depth = getattr(text_config(pretrained), "num_hidden_layers", 0) or 0
    if len(stored) < len(found) or layers != [*range(max(len(layers), depth))]:
        return None
    for module, of in stored.items():
        number_by_model(module, of[0])
    return sorted((stored[module][0], name, module) for _, name, module in found)


@functools.cache
def _follows_interface(cls: type[nn.Module]) -> bool:
    """Whether the code of a class's ``forward`` fills a cache and then asks for an attention function by name."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and set(code.co_names) >= _INTERFACE


def _check_order(pretrained: PreTrainedModel, found: list[tuple[int, str, nn.Module]]) -> None:
    """Raise UnsupportedModel unless there is one attention module for each of the layers 0, 1, 2, ..."""
    indices = [index for index, _, _ in found]
    if not found and not mixers(pretrained):
        classes = {type(module).__name__ for module in pretrained.modules()}
        kinds = sorted(name for name in classes if "attention" in name.lower())
        raise UnsupportedModel(
            f"{_of(pretrained)}: no layer both fills a KV cache and calls the function that transformers finds by its "
            f"attn_implementation, which is where a tree gets in; it has {', '.join(kinds) or 'no attention'}"
        )
    twice = next((index for index in indices if indices.count(index) > 1), None)
    if twice is not None:
        names = [name for index, name, _ in found if index == twice]
        raise UnsupportedModel(
            f"{_of(pretrained)}: {' and '.join(names)} both keep the KV of layer {twice}; a tree has one attention for "
            "each layer, no cross-attention and no second decoder"
        )
    if mixers(pretrained):
        return  # other layers keep states, or nothing
    depth = max(indices[-1] + 1, getattr(text_config(pretrained), "num_hidden_layers", 0) or 0)
    if len(found) < depth:
        missing = [index for index in range(depth) if index not in indices]
        raise UnsupportedModel(
            f"{_of(pretrained)}: of {depth} layers, {missing} keep no KV by the attention interface, but a recurrent "
            "state, a latent or what attention of another kind needs, which a tree does not hold"
        )


def _of(pretrained: PreTrainedModel) -> str:
    return f"{type(pretrained).__name__} (model_type {str(pretrained.config.model_type)!r})"


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True))


def _check_layer(name: str, module: nn.Module) -> None:
    kind = original_class(module).__name__
    if not _is_causal(module):
        raise UnsupportedModel(f"{name} ({kind}) is bidirectional; in a tree, tokens see their ancestors only")
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and "_hf_hook" in module.__dict__:
        forward = module.__dict__.get("_old_forward")  # accelerate's wrapper, which calls this one
    if forward is not None and not is_own_forward(module, forward):
        raise UnsupportedModel(
            f"{name} ({kind}) has a forward of its own, {forward!r}, behind which a patch is not seen; remove that "
            "wrapper, or patch first and wrap afterwards"
        )
