"""What prefixkit needs of transformers, probed once when ``prefixkit.models`` is imported, and names that changed."""

from __future__ import annotations

import inspect
from collections.abc import Container
from dataclasses import fields
from operator import attrgetter
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version
from transformers.modeling_outputs import CausalLMOutputWithPast

MINIMUM = "5.17"

# Attribute paths of transformers that the patch relies on, some of them undocumented.
_RELIED_ON = (
    "AttentionInterface.register",  # the attention function of patched layers
    "AttentionInterface.get_interface",  # attention classes find it by the name in their config,
    "PreTrainedConfig._attn_implementation",  # which is this attribute of it
    "AttentionMaskInterface.register",  # a name without a mask function would drop the mask silently
    "Cache.update",
    "Cache.get_seq_length",
    "Cache.get_mask_sizes",
    "models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",  # names of classes by model_type
)


class UnsupportedTransformers(ImportError):
    """The installed transformers is too old, or lacks something that prefixkit relies on."""


def check_version(found: str) -> None:
    """Raise UnsupportedTransformers for a version below :data:`MINIMUM`, a pre-release of it, or no version at all."""
    try:
        if Version(found) >= Version(MINIMUM):
            return
    except InvalidVersion:
        pass
    raise UnsupportedTransformers(
        f"prefixkit needs transformers {MINIMUM} or later, found {found}; run: pip install -U 'transformers>={MINIMUM}'"
    )


def check_transformers(transformers: ModuleType) -> None:
    """Raise UnsupportedTransformers if an imported transformers is too old, or lacks what prefixkit relies on."""
    check_version(transformers.__version__)
    missing = [path for path in _RELIED_ON if not _has(transformers, path)]
    if not missing and "layers" not in inspect.signature(transformers.Cache.__init__).parameters:
        missing = ["Cache(layers=...)"]
    if missing:
        raise UnsupportedTransformers(
            f"prefixkit needs {', '.join(missing)} of transformers, which the installed {transformers.__version__} "
            f"does not have; run: pip install 'transformers=={MINIMUM}.*'"
        )


def _has(transformers: ModuleType, path: str) -> bool:
    try:
        return attrgetter(path)(transformers) is not None
    except AttributeError:
        return False


# The keywords under which models and their layers take a cache: ``cache`` since transformers 5.24.  Before that models
# without attention took ``cache_params``, and all others, as code of models from a hub still does, ``past_key_values``.
CACHE_KEYWORDS = ("past_key_values", "cache", "cache_params")
# The keyword of most models of the installed transformers, and the field of their outputs.
CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in CACHE_KEYWORDS)


def cache_keyword(names: Container[str]) -> str:
    """The keyword for the cache among the names of a ``forward``'s arguments."""
    return next((name for name in CACHE_KEYWORDS if name in names), CACHE)


def name_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of a model's layer, with the cache as ``cache``, for functions that replace its code."""
    return {"cache" if name in CACHE_KEYWORDS else name: value for name, value in kwargs.items()}
