"""Forwards that are given to classes of a model later."""

from __future__ import annotations

from contextlib import contextmanager


@contextmanager
def class_level_forward(cls, factor):
    """In this block every module of class ``cls`` returns ``factor`` times what it returned before."""
    before = cls.forward

    def forward(self, *args, **kwargs):
        output = before(self, *args, **kwargs)
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    cls.forward = forward
    try:
        yield
    finally:
        cls.forward = before
