"""Tracing a Python function with FlexAttention's signature into the expression that it computes.

The function runs once over proxies (torch.fx), which record its operations.  Literals and captured numbers become
scalars, and indexing captured tensors becomes loads: neither these numbers nor the tensors are part of the expression's
code.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from prefixkit.attention.variants.expression import ARGUMENTS, Expression
from prefixkit.attention.variants.tracing import watch
from prefixkit.attention.variants.tracing.expression_builder import ExpressionBuilder
from prefixkit.attention.variants.tracing.special_operations import SPECIAL
from prefixkit.attention.variants.tracing.untraceable import Line, refuse

SCORE_MOD, MASK_MOD = ARGUMENTS, ARGUMENTS[1:]
_TORCH = str(Path(torch.__file__).parent)
_OURS = (__file__, watch.__file__)


def trace(function: Callable[..., object], arguments: Sequence[str]) -> Expression:
    """Trace a ``score_mod`` or ``mask_mod``.

    Args:
        function: An elementwise function of 0-d tensors.
        arguments: :data:`SCORE_MOD` or :data:`MASK_MOD`, in the function's order.

    Raises:
        UntraceableVariant: the message names the operation, or what went wrong, and its source line.
    """
    tracer = _Tracer()
    try:
        graph = tracer.trace(_with_arity(function, len(arguments), tracer.copies))
    except Exception as error:
        refuse(function, _reason(error), _line_of(error))
    builder = ExpressionBuilder(function, arguments, SPECIAL, tracer.tensors, tracer.copies.operation)
    for node in graph.nodes:
        builder.visit(node, tracer.lines.get(node))
    return builder.expression()


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which also records the line of the caller's code for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[fx.Node, Line] = {}
        self.tensors: dict[str, Tensor] = {}
        self.copies = watch.Copies()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame = inspect.currentframe()
        while frame is not None and not _is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            self.lines[node] = frame.f_code.co_filename, frame.f_lineno
        return node

    def create_arg(self, a: Any) -> Any:
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        name = f"tensor_{len(self.tensors)}"
        self.tensors[name] = a
        return self.create_node("get_attr", name, (), {})

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(*args, **kwargs)


def _with_arity(function: Callable[..., object], count: int, copies: watch.Copies) -> Callable[..., object]:
    """A plain function that torch.fx can trace, for any kind of callable ``function``."""

    def called(*given: object) -> object:
        with copies:
            return function(*given)

    if count == len(SCORE_MOD):
        return lambda score, b, h, q_idx, kv_idx: called(score, b, h, q_idx, kv_idx)
    return lambda b, h, q_idx, kv_idx: called(b, h, q_idx, kv_idx)


def _reason(error: Exception) -> str:
    if isinstance(error, fx.proxy.TraceError):
        return "control flow depends on a value, which differs for every score (use torch.where)"
    if isinstance(error, watch.ReadsNumbers):
        return (
            f"{str(error)!r} reads numbers of a captured tensor, which would not follow later changes of it; compute "
            "with its elements, as in table[h] or with the tensor itself if it has no dimension"
        )
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _line_of(error: Exception) -> Line | None:
    """The innermost line of the caller's code in an exception's traceback."""
    frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(frames) if _is_own(line[0])), None)


def _is_own(file: str) -> bool:
    """Whether a file is the caller's, neither torch's nor one of these."""
    return file not in _OURS and not file.startswith(_TORCH)
