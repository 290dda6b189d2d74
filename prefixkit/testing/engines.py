"""An engine over a model, without a session: what tests and benchmarks of steps run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixkit.engine.engine import Engine
from prefixkit.engine.request import Request
from prefixkit.models import patched_facts
from prefixkit.session import assembly


def make_engine(model: Any, requests: Sequence[Request], **options: Any) -> Engine:
    """An engine over a patched model; see :func:`prefixkit.session.assembly.make_engine`."""
    return assembly.make_engine(patched_facts(model), requests, **options)
