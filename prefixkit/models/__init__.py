"""Hugging Face models over a prefix tree; the only package of the library that imports transformers."""

import transformers

from prefixkit.models.requirements import UnsupportedTransformers, check_transformers

# Before anything else is imported from transformers, which older versions may not have.
check_transformers(transformers)

# ruff: noqa: E402
from prefixkit.models.attention_class import is_patched
from prefixkit.models.families import pretrained_model, text_config
from prefixkit.models.generate.tree_cache import TreeCache
from prefixkit.models.model_errors import IncompleteStep, NotPatched, UnsupportedModel
from prefixkit.models.patch import patch, patched, unpatch
from prefixkit.models.runner import ModelRunner
from prefixkit.models.shape import kv_spec, longest_text, query_heads
from prefixkit.models.step_cache import StepCache

__all__ = [
    "IncompleteStep",
    "ModelRunner",
    "NotPatched",
    "StepCache",
    "TreeCache",
    "UnsupportedModel",
    "UnsupportedTransformers",
    "is_patched",
    "kv_spec",
    "longest_text",
    "patch",
    "patched",
    "pretrained_model",
    "query_heads",
    "text_config",
    "unpatch",
]
