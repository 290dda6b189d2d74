"""Building an expression from the operations that were recorded while a function was traced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from prefixkit.attention.variants.expression import ARGUMENTS, Captured, Expression, Node, Type, closed
from prefixkit.attention.variants.operations import CASTS, OPERATIONS, named
from prefixkit.attention.variants.tracing.traced_values import (
    POSITION_BITS,
    WIDE,
    Partial,
    Value,
    fits,
    whole_dtype,
    wrapped,
)
from prefixkit.attention.variants.tracing.untraceable import Line, UntraceableVariant, refuse

_TYPES = {name: Type.FLOAT if name == "score" else Type.INT for name in ARGUMENTS}
# The names of the operands of torch's functions, by their number.
_OPERANDS = {1: ("input",), 2: ("input", "other"), 3: ("condition", "input", "other")}
# Torch has these of two booleans, by other names, and does not have those.
_OF_TRUTHS = {"add": "or", "mul": "and"}
_NOT_OF_TRUTHS = ("floordiv", "mod", "shl", "shr")
_CHOOSING = ("where", "min", "max")
_ROUNDING = ("floor", "ceil", "round", "trunc")


# Builds what a function is that is more than one operation, of its name, operands and keywords.
Special = Callable[["ExpressionBuilder", str, list[Any], dict[str, Any]], Any]


class ExpressionBuilder:
    """Builds an expression.  Operands are nodes (:class:`Value`), literals and captured tensors."""

    def __init__(
        self,
        function: Callable[..., object],
        arguments: Sequence[str],
        special: Mapping[str, Special],
        tensors: dict[str, Tensor],
        copied_by: Callable[[Tensor], str | None],
    ) -> None:
        """``special`` has the functions that are more than one operation, or none; ``tensors`` the captured ones, by
        the names of their nodes; ``copied_by`` names the operation that made one of these from others.
        """
        self._special = special
        self._function, self._arguments, self._named, self._copied_by = function, iter(arguments), tensors, copied_by
        self._nodes: list[Node] = []
        self._scalars: list[bool | int | float] = []
        self.tensors: list[Captured] = []
        self._known: dict[fx.Node, Any] = {}
        self._line: Line | None = None
        self._name = "return"  # the operation at that line
        self._returned = -1

    def expression(self) -> Expression:
        return closed(self._nodes, self._returned, self._scalars, self.tensors)

    def visit(self, node: fx.Node, line: Line | None) -> None:
        self._line = line
        if node.op == "placeholder":
            name = next(self._arguments)
            kind = _TYPES[name]
            self._known[node] = self.new("argument", (), kind, ARGUMENTS.index(name), bits=POSITION_BITS)
        elif node.op == "get_attr":
            self._known[node] = Partial(self._capture(self._named[str(node.target)]))
        elif node.op == "output":
            self._name = "return"
            self._returned = self.value(self._operand(node.args[0])).number
        else:
            self._known[node] = self._call(node)

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self._known[arg]
        if isinstance(arg, tuple | list):
            return tuple(self._operand(each) for each in arg)
        return arg

    def _call(self, node: fx.Node) -> Any:
        name = str(getattr(node.target, "__name__", node.target))
        if node.target in (operator.invert, operator.inv):  # `~x`, by either of its names
            name = "not"
        self._name = name
        given = [self._operand(arg) for arg in node.args]
        options = {key: self._operand(arg) for key, arg in node.kwargs.items()}
        special = self._special.get(name.strip("_") if name.startswith("__") else name)
        try:
            if special is not None:
                return special(self, name, given, options)
            op = named(name)
            if op is None:
                self.fail(f"the operation {name!r} is not one that kernels support")
            names = _OPERANDS[OPERATIONS[op].count]
            method = op == "where" and node.op == "call_method"
            operands = self.operands(name, given, options, *((names[1], names[0], names[2]) if method else names))
            return self.apply(op, *((operands[1], operands[0], operands[2]) if method else operands))
        except UntraceableVariant:
            raise
        except Exception as error:
            self.fail(f"the operation {name!r} cannot be traced as it is called ({type(error).__name__}: {error})")

    def operands(
        self, name: str, given: Sequence[Any], options: dict[str, Any], *names: str, optional: int = 0
    ) -> list[Any]:
        """Operands of these names, passed by place or by keyword; the last ``optional`` ones may lack: None."""
        left = dict(options)
        found = [*given, *(left.pop(key, None) for key in names[len(given) :])]
        if left or len(found) > len(names) or None in found[: len(names) - optional]:
            self.fail(f"{name!r} is taken with the operands {', '.join(names)} and no options")
        return found

    def apply(self, op: str, *operands: Any) -> Value:
        """An operation on operands that are promoted to one type, as torch does it."""
        values = [self.value(each) for each in operands]
        kinds = tuple(value.type for value in values)
        truths = set(kinds) == {Type.BOOL}
        if op in _ROUNDING and kinds == (Type.INT,):
            return values[0]
        op = _OF_TRUTHS.get(op, op) if truths else op
        operation = OPERATIONS[op]
        if not set(kinds) <= set(operation.takes) or (truths and op in _NOT_OF_TRUTHS):
            self.fail(f"{op!r} takes no operands of type {', '.join(kind.value for kind in kinds)}")
        result, first = operation.result(kinds), int(op == "where")
        if first:
            values[0] = self.cast(values[0], Type.BOOL)
        dtype = whole_dtype(*values[first:])
        if len(kinds) > 1:
            common = Type.FLOAT if op in ("div", "pow") else OPERATIONS["max"].result(kinds[first:])
            values[first:] = [self._narrowed(op, self.cast(value, common), dtype) for value in values[first:]]
        numbers, bits = tuple(value.number for value in values), _bits(op, [value.bits for value in values[first:]])
        made = self.new(op, numbers, result, dtype=dtype, bits=bits)
        return made if result is not Type.INT or op in _CHOOSING else self._wrapped(made, dtype)

    def _narrowed(self, op: str, value: Value, dtype: torch.dtype) -> Value:
        """An operand that torch brings to ``dtype`` if it is an integer: literals change, others are in its range."""
        node = self._nodes[value.number]
        if node.op != "scalar" or value.type is not Type.INT or dtype == WIDE:
            return value
        number = int(self._scalars[node.slot])
        if op in _CHOOSING and not fits(number, dtype):
            self.fail(f"{op!r} of {dtype} takes no literal {number}, which is out of its range")
        return value if number == wrapped(number, dtype) else self.value(wrapped(number, dtype))

    def _wrapped(self, value: Value, dtype: torch.dtype) -> Value:
        info = torch.iinfo(dtype)
        if dtype == WIDE or (info.min and value.bits < info.bits):
            return replace(value, dtype=dtype)
        return self.new(CASTS[dtype], (value.number,), Type.INT, dtype=dtype, bits=info.bits)

    def cast(self, value: Value, kind: Type) -> Value:
        node = self._nodes[value.number]
        if value.type is kind:
            return value
        if node.op == "scalar":
            number = self._scalars[node.slot]
            return self.value({Type.BOOL: bool, Type.INT: int, Type.FLOAT: float}[kind](number))
        return self.new(kind.value, (value.number,), kind, bits=1 if value.type is Type.BOOL else 64)

    def to_dtype(self, value: Value, dtype: torch.dtype) -> Value:
        """A value that torch has brought to a dtype."""
        if dtype not in CASTS:
            self.fail(f"kernels do not compute in {dtype}")
        kind = OPERATIONS[CASTS[dtype]].result(())
        if kind is Type.INT:
            return self._wrapped(self.cast(value, kind), dtype)
        return value if CASTS[dtype] == value.type.value else self.new(CASTS[dtype], (value.number,), kind)

    def like(self, value: Value, other: Value) -> Value:
        """A value in the dtype of another one."""
        return self.to_dtype(value, other.dtype or WIDE) if other.type is Type.INT else self.cast(value, other.type)

    def value(self, operand: Any) -> Value:
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, bool | int | float):
            self._scalars.append(operand)
            bits = POSITION_BITS if abs(operand) < 1 << POSITION_BITS else 64
            return replace(self.new("scalar", (), Type.of(operand), len(self._scalars) - 1, bits=bits), dtype=None)
        if isinstance(operand, Partial):
            return self._load(operand)
        self.fail(f"{operand!r} is no value that an expression can hold")

    def _load(self, operand: Partial) -> Value:
        tensor = self.tensors[operand.slot].tensor
        if len(operand.indices) != tensor.ndim:
            shape = list(tensor.shape)
            self.fail(
                f"{self._name!r} takes single numbers, and a captured tensor of shape {shape} is read with "
                f"{len(operand.indices)} indices; index it first, as in table[h].to(score.dtype)"
            )
        indices = [self.value(index) for index in operand.indices]
        if any(index.type is not Type.INT for index in indices):
            self.fail("a captured tensor is indexed by what is not an integer")
        kind, dtype = Type.of(tensor), tensor.dtype if tensor.dtype in CASTS else WIDE
        bits = torch.iinfo(dtype).bits if kind is Type.INT else 64
        return self.new("load", tuple(index.number for index in indices), kind, operand.slot, dtype=dtype, bits=bits)

    def new(
        self,
        op: str,
        args: tuple[int, ...],
        kind: Type,
        slot: int = -1,
        *,
        dtype: torch.dtype = WIDE,
        bits: int = 64,
    ) -> Value:
        self._nodes.append(Node(op, args, kind, slot))
        return Value(len(self._nodes) - 1, kind, dtype if kind is Type.INT else None, bits)

    def _capture(self, tensor: Tensor) -> int:
        if (made := self._copied_by(tensor)) is not None:
            self.fail(
                f"{made!r} computes a tensor from a captured one while the function is traced, which would not follow "
                "later changes of it; compute with its elements, as in torch.exp(table[h])"
            )
        for slot, captured in enumerate(self.tensors):
            if captured.tensor is tensor:
                return slot
        self.tensors.append(Captured(tensor))
        return len(self.tensors) - 1

    def fail(self, reason: str) -> NoReturn:
        refuse(self._function, reason, self._line)


def _bits(op: str, of: list[int]) -> int:
    """Bits of the magnitude of a result, at most 64."""
    bits = {"add": max(of) + 1, "sub": max(of) + 1, "mul": sum(of), "shl": 64}.get(op, max(of))
    return min(bits, 64)
