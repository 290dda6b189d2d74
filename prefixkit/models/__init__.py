"""Hugging Face models over a prefix tree; the only room that imports transformers."""

from prefixkit.models.cache import PrefixCache
from prefixkit.models.errors import IncompleteStep, NotPatched, UnsupportedModel
from prefixkit.models.families import FAMILIES
from prefixkit.models.patch import is_patched, patch, patched, unpatch
from prefixkit.models.runner import ModelRunner
from prefixkit.models.shape import kv_spec, query_heads

__all__ = [
    "FAMILIES",
    "IncompleteStep",
    "ModelRunner",
    "NotPatched",
    "PrefixCache",
    "UnsupportedModel",
    "is_patched",
    "kv_spec",
    "patch",
    "patched",
    "query_heads",
    "unpatch",
]
