"""Tracing a Python function with FlexAttention's signature into the expression that it computes.

The function runs once over proxies (torch.fx), which record its operations.  Literals and captured numbers become
scalars, and indexing captured tensors becomes loads: neither these numbers nor the tensors are part of the expression's
code.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from prefixkit.attention.variants.expression import ARGUMENTS, Captured, Expression, Node, Type, closed
from prefixkit.attention.variants.operations import CASTS, OPERATIONS, named

SCORE_MOD, MASK_MOD = ARGUMENTS, ARGUMENTS[1:]
_TYPES = {name: Type.FLOAT if name == "score" else Type.INT for name in ARGUMENTS}
_FILLED = {"ones": 1, "zeros": 0}
_TORCH = str(Path(torch.__file__).parent)
Line = tuple[str, int]  # file, line number


class UntraceableVariant(ValueError):
    """A function uses an operation that expressions lack, or control flow that depends on a value."""


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
        graph = tracer.trace(_with_arity(function, len(arguments)))
    except Exception as error:
        _refuse(function, _reason(error), _line_of(error))
    builder = _Builder(function, tracer, arguments)
    for node in graph.nodes:
        builder.visit(node)
    return builder.expression()


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which also records the line of the caller's code for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[fx.Node, Line] = {}

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame = inspect.currentframe()
        while frame is not None and not _is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            self.lines[node] = frame.f_code.co_filename, frame.f_lineno
        return node


def _with_arity(function: Callable[..., object], count: int) -> Callable[..., object]:
    """A plain function that torch.fx can trace, for any kind of callable ``function``."""
    if count == len(SCORE_MOD):
        return lambda score, b, h, q_idx, kv_idx: function(score, b, h, q_idx, kv_idx)
    return lambda b, h, q_idx, kv_idx: function(b, h, q_idx, kv_idx)


class _Partial:
    """A captured tensor with its first indices; the others may follow."""

    def __init__(self, slot: int, indices: tuple[object, ...] = ()) -> None:
        self.slot, self.indices = slot, indices


class _Property:
    """The device or the dtype of a value."""

    def __init__(self, name: str, of: object) -> None:
        self.name, self.of = name, of


class _Builder:
    """Builds an expression.  Operands are numbers of nodes (:class:`_Value`), literals and captured tensors."""

    def __init__(self, function: Callable[..., object], tracer: _Tracer, arguments: Sequence[str]) -> None:
        self._function, self._tracer, self._arguments = function, tracer, iter(arguments)
        self._nodes: list[Node] = []
        self._scalars: list[bool | int | float] = []
        self._tensors: list[Captured] = []
        self._known: dict[fx.Node, Any] = {}
        self._line: Line | None = None
        self._returned = -1

    def expression(self) -> Expression:
        return closed(self._nodes, self._returned, self._scalars, self._tensors)

    def visit(self, node: fx.Node) -> None:
        self._line = self._tracer.lines.get(node)
        if node.op == "placeholder":
            name = next(self._arguments)
            self._known[node] = self._new("argument", (), _TYPES[name], ARGUMENTS.index(name))
        elif node.op == "get_attr":
            self._known[node] = _Partial(self._capture(getattr(self._tracer.root, str(node.target))))
        elif node.op == "output":
            self._returned = self._value(self._operand(node.args[0])).number
        else:
            name = str(getattr(node.target, "__name__", node.target))
            if node.target in (operator.invert, operator.inv):  # `~x`, by either of its names
                name = "not"
            given = [self._operand(arg) for arg in node.args]
            options = {key: self._operand(arg) for key, arg in node.kwargs.items()}
            self._known[node] = self._call(name, given, options)

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self._known[arg]
        if isinstance(arg, tuple | list):
            return tuple(self._operand(each) for each in arg)
        return arg

    def _call(self, name: str, given: list[Any], options: dict[str, Any]) -> Any:
        special = _SPECIAL.get(name.strip("_") if name.startswith("__") else name)
        if special is not None:
            return special(self, name, given, options)
        op = named(name)
        if op is None:
            self._fail(f"the operation {name!r} is not one that kernels support")
        if len(given) != OPERATIONS[op].count or options:
            self._fail(f"{name!r} is taken with {OPERATIONS[op].count} operands and no options")
        return self.apply(op, *given)

    def apply(self, op: str, *operands: Any) -> _Value:
        """An operation on operands that are promoted to one type, as torch does it."""
        values, operation = [self._value(each) for each in operands], OPERATIONS[op]
        kinds = tuple(value.type for value in values)
        if not set(kinds) <= set(operation.takes):
            self._fail(f"{op!r} takes no operands of type {', '.join(kind.value for kind in kinds)}")
        result = operation.result(kinds)
        choice = op == "where"
        common = OPERATIONS["max"].result(kinds[1:] if choice else kinds)
        if op in ("div", "pow"):
            common = Type.FLOAT
        elif common is Type.BOOL and result is Type.INT and op != "int":
            common = Type.INT
        if len(kinds) > 1 or op in ("neg", "abs"):
            first = [self.cast(values[0], Type.BOOL)] if choice else []
            values = [*first, *(self.cast(value, common) for value in values[len(first) :])]
        return self._new(op, tuple(value.number for value in values), result)

    def cast(self, value: _Value, kind: Type) -> _Value:
        node = self._nodes[value.number]
        if value.type is kind:
            return value
        if node.op == "scalar":
            number = self._scalars[node.slot]
            return self._value({Type.BOOL: bool, Type.INT: int, Type.FLOAT: float}[kind](number))
        return self._new(kind.value, (value.number,), kind)

    def _value(self, operand: Any) -> _Value:
        if isinstance(operand, _Value):
            return operand
        if isinstance(operand, bool | int | float):
            self._scalars.append(operand)
            return self._new("scalar", (), Type.of(operand), len(self._scalars) - 1)
        if isinstance(operand, _Partial):
            tensor = self._tensors[operand.slot].tensor
            if len(operand.indices) != tensor.ndim:
                shape = list(tensor.shape)
                self._fail(f"a captured tensor of shape {shape} is read with {len(operand.indices)} indices")
            indices = [self._value(index) for index in operand.indices]
            if any(index.type is not Type.INT for index in indices):
                self._fail("a captured tensor is indexed by what is not an integer")
            return self._new("load", tuple(index.number for index in indices), Type.of(tensor), operand.slot)
        if isinstance(operand, Tensor) and operand.ndim == 0:
            return self._value(_Partial(self._capture(operand)))
        self._fail(f"{operand!r} is no value that an expression can hold")

    def _new(self, op: str, args: tuple[int, ...], kind: Type, slot: int = -1) -> _Value:
        self._nodes.append(Node(op, args, kind, slot))
        return _Value(len(self._nodes) - 1, kind)

    def _capture(self, tensor: Tensor) -> int:
        for slot, captured in enumerate(self._tensors):
            if captured.tensor is tensor:
                return slot
        self._tensors.append(Captured(tensor))
        return len(self._tensors) - 1

    def _fail(self, reason: str) -> NoReturn:
        _refuse(self._function, reason, self._line)

    # ---- functions that are more than one operation ----

    def getitem(self, name: str, given: list[Any], options: dict[str, Any]) -> _Partial:
        of, index = given
        if not isinstance(of, _Partial):
            self._fail("only captured tensors can be indexed")
        return _Partial(of.slot, (*of.indices, *(index if isinstance(index, tuple) else (index,))))

    def getattr(self, name: str, given: list[Any], options: dict[str, Any]) -> _Property:
        of, attribute = given
        if attribute not in ("device", "dtype"):
            self._fail(f"the attribute {attribute!r} is not known: a function works on single numbers")
        return _Property(attribute, of)

    def to(self, name: str, given: list[Any], options: dict[str, Any]) -> Any:
        of, *others = given
        for target in (*others, *options.values()):
            moves = isinstance(target, torch.device | str) or getattr(target, "name", "") == "device"
            if moves and isinstance(of, _Partial) and not of.indices:
                captured = self._tensors[of.slot]
                self._tensors[of.slot] = Captured(captured.tensor, follows=True)
            elif isinstance(target, torch.dtype | _Property) and not moves:
                of = self.to_dtype(of, target)
            elif not moves and not isinstance(target, bool):
                self._fail(f"a value cannot be brought to {target!r}")
        return of

    def to_dtype(self, of: Any, target: Any) -> _Value:
        value = self._value(of)
        if isinstance(target, _Property):
            return self.cast(value, self._value(target.of).type)
        if target not in CASTS:
            self._fail(f"kernels do not compute in {target}")
        op = CASTS[target]
        return value if op == value.type.value else self._new(op, (value.number,), OPERATIONS[op].result(()))

    def type_as(self, name: str, given: list[Any], options: dict[str, Any]) -> _Value:
        of, other = given
        return self.cast(self._value(of), self._value(other).type)

    def divide(self, name: str, given: list[Any], options: dict[str, Any]) -> _Value:
        mode = options.pop("rounding_mode", None)
        if mode not in (None, "floor") or options or len(given) != 2:
            self._fail(f"{name!r} is taken with two operands and rounding_mode None or 'floor'")
        return self.apply("div" if mode is None else "floordiv", *given)

    def logical(self, name: str, given: list[Any], options: dict[str, Any]) -> _Value:
        truths = [self.cast(self._value(each), Type.BOOL) for each in given]
        return self.apply(str(named(name.removeprefix("logical_") + ("_" if "not" not in name else ""))), *truths)

    def clamp(self, name: str, given: list[Any], options: dict[str, Any]) -> Any:
        of, low, high = (*given, None, None)[:3]
        low, high = options.pop("min", low), options.pop("max", high)
        of = of if low is None else self.apply("max", of, low)
        return of if high is None else self.apply("min", of, high)

    def masked_fill(self, name: str, given: list[Any], options: dict[str, Any]) -> _Value:
        of, mask, value = given
        return self.cast(self.apply("where", mask, value, of), self._value(of).type)

    def square(self, name: str, given: list[Any], options: dict[str, Any]) -> _Value:
        return self.apply("mul", given[0], given[0])

    def power(self, name: str, given: list[Any], options: dict[str, Any]) -> _Value:
        of, exponent = given
        if isinstance(exponent, int) and exponent == 2:  # for integers too
            return self.apply("mul", of, of)
        return self.apply("pow", of, exponent)

    def filled(self, name: str, given: list[Any], options: dict[str, Any]) -> _Value:
        """``x.new_ones(())``, ``torch.zeros_like(x)`` and the like: a number."""
        dtype = options.get("dtype")
        like = given[0] if name.endswith("_like") or name.startswith("new_") else None
        number = next((filling for word, filling in _FILLED.items() if word in name), None)
        value = self._value(given[2 if name == "new_full" else 1] if number is None else number)
        if dtype is None and like is not None:
            return self.cast(value, self._value(like).type)
        return self.to_dtype(value, torch.get_default_dtype() if dtype is None else dtype)


class _Value:
    """A node of the expression, by its number."""

    def __init__(self, number: int, kind: Type) -> None:
        self.number, self.type = number, kind


_Special = Callable[[_Builder, str, list[Any], dict[str, Any]], Any]
_SPECIAL: dict[str, _Special] = {
    "getitem": _Builder.getitem,
    "getattr": _Builder.getattr,
    "to": _Builder.to,
    "type": _Builder.to,
    "type_as": _Builder.type_as,
    "div": _Builder.divide,
    "divide": _Builder.divide,
    "clamp": _Builder.clamp,
    "clip": _Builder.clamp,
    "masked_fill": _Builder.masked_fill,
    "square": _Builder.square,
    "pow": _Builder.power,
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor", "logical_not"), _Builder.logical),
    **dict.fromkeys(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"), _Builder.filled),
}


def _refuse(function: object, reason: str, line: Line | None) -> NoReturn:
    name = getattr(function, "__name__", type(function).__name__)
    at = "" if line is None else f" at {line[0]}:{line[1]}: {linecache.getline(*line).strip()}"
    raise UntraceableVariant(
        f"{name}: {reason}{at}. Write it with arithmetic, comparisons, torch.where and indices of captured tensors; or "
        "pass traced=False, which runs the variant in plain torch"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, fx.proxy.TraceError):
        return "control flow depends on a value, which differs for every score (use torch.where)"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _line_of(error: Exception) -> Line | None:
    """The innermost line of the caller's code in an exception's traceback."""
    frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(frames) if _is_own(line[0])), None)


def _is_own(file: str) -> bool:
    """Whether a file is the caller's, neither torch's nor this one."""
    return file != __file__ and not file.startswith(_TORCH)
