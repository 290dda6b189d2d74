"""Errors between a Hugging Face model and a prefix tree."""

from __future__ import annotations


class UnsupportedModel(TypeError):
    """The model computes something that attention over a tree does not support; nothing was changed."""


class NotPatched(TypeError):
    """A :class:`StepCache` reached a model, or a layer of it, that ``patch`` has not touched."""


class IncompleteStep(ValueError):
    """Some attention layers were not called with the :class:`StepCache` exactly once during a step."""


class UnsupportedVariant(ValueError):
    """A layer cannot apply a variant of attention, or a call would run without it; nothing was changed."""
