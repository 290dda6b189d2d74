"""Hugging Face models over a prefix tree; the only package of the library that imports transformers."""

import transformers

from prefixkit.models.requirements import UnsupportedTransformers, check_transformers

# Checked before the imports below, which older versions of transformers may not provide.
check_transformers(transformers)

# ruff: noqa: E402
from prefixkit.models.attention_class import is_patched
from prefixkit.models.facts import ModelFacts, facts_of, kv_spec, patched_facts
from prefixkit.models.families import pretrained_model, text_config
from prefixkit.models.generate.tree_cache import TreeCache
from prefixkit.models.model_errors import IncompleteStep, NotPatched, UnsupportedModel, UnsupportedVariant
from prefixkit.models.patch import patch, patched, unpatch
from prefixkit.models.steps.runner import ModelRunner
from prefixkit.models.steps.step_cache import StepCache

__all__ = [
    "IncompleteStep",
    "ModelFacts",
    "ModelRunner",
    "NotPatched",
    "StepCache",
    "TreeCache",
    "UnsupportedModel",
    "UnsupportedTransformers",
    "UnsupportedVariant",
    "facts_of",
    "is_patched",
    "kv_spec",
    "patch",
    "patched",
    "patched_facts",
    "pretrained_model",
    "text_config",
    "unpatch",
]
