"""One function of a variant: traced into an expression, or called as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from prefixkit.attention.variants.evaluate import evaluate, pointwise
from prefixkit.attention.variants.expression import Expression, Type
from prefixkit.attention.variants.tracing.trace import MASK_MOD, SCORE_MOD, trace
from prefixkit.attention.variants.tracing.watch import uses


class BadVariant(ValueError):
    """A variant cannot be made from these functions."""


@dataclass(frozen=True, eq=False)
class Mod:
    """One function of a variant.

    Attributes:
        function: The Python function.
        arguments: The names of its arguments: :data:`SCORE_MOD` or :data:`MASK_MOD`.
        expression: The traced function, without causality if attention applies that itself; None if it is not traced.
        uses_sequence: Whether a function that is not traced computes with ``b``.
    """

    function: Callable[..., Tensor]
    arguments: tuple[str, ...]
    expression: Expression | None
    uses_sequence: bool = False

    def __call__(self, **values: Tensor) -> Tensor:
        """The function's result for tensors that broadcast, passed by the names of the arguments."""
        if self.expression is not None:
            return evaluate(self.expression, **values)
        return pointwise(self.function, *(values[name] for name in self.arguments))

    def reads(self, argument: str) -> bool:
        """Whether the result depends on an argument; what is not traced may read all but ``b``."""
        if self.expression is not None:
            return self.expression.reads(argument)
        return self.uses_sequence if argument == "b" else True


def mod_of(kind: str, function: Callable[..., Tensor], arguments: Sequence[str], traced: bool) -> Mod:
    """The checked function of a ``kind`` of variant, "score_mod" or "mask_mod".

    Raises:
        BadVariant: the function takes other arguments, or does not return a mask or score.
        UntraceableVariant: it is to be traced, and cannot be.
    """
    check_arguments(kind, function, arguments, "as FlexAttention's do")
    if not traced:
        return Mod(function, tuple(arguments), None, uses(function, arguments, "b"))
    expression = trace(function, arguments)
    found = expression.nodes[-1].type
    if (found is Type.BOOL) != (arguments == MASK_MOD) or (found is not Type.FLOAT and arguments == SCORE_MOD):
        wanted = "a bool, what is visible" if arguments == MASK_MOD else "a float, the new score"
        raise BadVariant(f"variant: {kind} {name_of(function)!r} must return {wanted}, but it returns {found.value}")
    return Mod(function, tuple(arguments), expression)


def check_arguments(kind: str, function: Callable[..., Tensor], arguments: Sequence[str], which: str) -> None:
    """Raise BadVariant unless a function can be called with these arguments, which are like ``which``."""
    if not callable(function):
        raise BadVariant(f"variant: {kind} must be a function, got {type(function).__name__} {function!r}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise BadVariant(
            f"variant: {kind} {name_of(function)!r} must take {len(arguments)} arguments, ({', '.join(arguments)}), "
            f"{which}, but it takes {inspect.signature(function)}"
        ) from error


def name_of(function: object) -> str:
    """The name of a function, or of the type of any other callable."""
    return str(getattr(function, "__name__", type(function).__name__))
