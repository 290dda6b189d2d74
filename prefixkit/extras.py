"""Packages that only some commands need."""

from __future__ import annotations

import importlib.util


class MissingExtra(ImportError):
    """A package of an optional extra is not installed."""


def require(package: str, extra: str) -> None:
    """Raise `MissingExtra`, with the remedy, unless ``package`` can be imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(f'this needs the package {package}; run: pip install "prefixkit[{extra}]"')
