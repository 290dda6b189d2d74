"""Which models prefixkit understands, and where their attention layers are."""

from __future__ import annotations

import difflib
import functools
import operator
from types import MethodType

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS

from prefixkit.models.attention import original_class
from prefixkit.models.errors import UnsupportedModel

# Every model_type here is tested: a tree's logits equal the original's, with a window shorter than the text where the
# family has windows.
#
# Left out although the mechanism would run: Qwen2-MoE and PhiMoE put their window into the mask but do not tell the
# attention function; OLMoE tells it a window that its mask ignores; Doge and DiffLlama change the mask or the values
# on the way.
# fmt: off
_TESTED = (
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "cwm", "dots1", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama",
    "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3",
    "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
)
# fmt: on
# model_type -> its attention class, as package.Class below transformers.models: LlamaForCausalLM has LlamaAttention.
FAMILIES = {
    model_type: f"{model_type.removesuffix('_text')}.{CAUSAL_LMS[model_type].removesuffix('ForCausalLM')}Attention"
    for model_type in _TESTED
    if model_type in CAUSAL_LMS
}


def attention_layers(model: object) -> dict[str, nn.Module]:
    """The attention modules of a supported model, patched or not, by name and in the order of ``layer_idx``.

    Raises:
        UnsupportedModel: ``model`` is no transformers model, is not in the tested table, or has layers of another
            kind, in another order, or wrapped in a way that a patch would not reach.
    """
    pretrained = pretrained_model(model)
    model_type = str(pretrained.config.model_type)
    if model_type not in FAMILIES:
        raise UnsupportedModel(_not_in_table(pretrained, model_type))
    found: list[tuple[int, str, nn.Module]] = []
    for name, module in pretrained.named_modules():
        if _is_attention_of(model_type, original_class(module)):
            _check_layer(name, module)
            found.append((int(module.layer_idx), name, module))
    found.sort(key=operator.itemgetter(0))
    indices = [index for index, _, _ in found]
    if not found or indices != list(range(len(found))):
        raise UnsupportedModel(
            f"{type(pretrained).__name__} (model_type {model_type!r}): expected one "
            f"{FAMILIES[model_type].split('.')[1]} for each layer 0, 1, 2, ..., found layers {indices}; custom "
            "attention classes are not supported"
        )
    return {name: module for _, name, module in found}


def pretrained_model(model: object) -> PreTrainedModel:
    """The outermost transformers model in ``model``, which may be a wrapper around it; UnsupportedModel without one."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedModel(
        f"expected a transformers causal language model, got {type(model).__name__}, which holds none"
    )


def _is_attention_of(model_type: str, cls: type[nn.Module]) -> bool:
    """Whether ``cls`` is the family's attention class, or a subclass with the same ``forward`` (FSDP makes such)."""
    package, class_name = FAMILIES[model_type].split(".")
    for base in cls.__mro__:
        if (base.__module__, base.__qualname__) == (f"transformers.models.{package}.modeling_{package}", class_name):
            return base.__dict__.get("forward") is cls.forward
    return False


def _check_layer(name: str, module: nn.Module) -> None:
    kind = original_class(module).__name__
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{name} ({kind}) is bidirectional; in a tree, tokens see their ancestors only")
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and "_hf_hook" in module.__dict__:
        forward = module.__dict__.get("_old_forward")  # accelerate's wrapper, which calls this one
    if forward is not None and not is_own_forward(module, forward):
        raise UnsupportedModel(
            f"{name} ({kind}) has a forward of its own, {forward!r}, behind which a patch is not seen; remove that "
            "wrapper, or patch first and wrap afterwards"
        )


def is_own_forward(module: nn.Module, forward: object) -> bool:
    """Whether ``forward`` is the bound method of the module's class."""
    return isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward


def _not_in_table(pretrained: PreTrainedModel, model_type: str) -> str:
    kinds = {type(module).__name__ for module in pretrained.modules()}
    attention = sorted(kind for kind in kinds if "Attention" in kind)
    nearest = difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=0.0)[0]
    uses = f"uses {', '.join(attention)}" if attention else "has no attention class that prefixkit knows of"
    return (
        f"{type(pretrained).__name__} (model_type {model_type!r}) {uses}, which prefixkit has not been tested with. "
        f"The nearest supported model_type is {nearest!r}; supported are {', '.join(sorted(FAMILIES))}"
    )
