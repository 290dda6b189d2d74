"""The operations of expressions: their names in Python and torch, result types, and how torch computes them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from prefixkit.attention.variants.expression import Type

Rule = Callable[[tuple[Type, ...]], Type]


def _promoted(types: tuple[Type, ...]) -> Type:
    order = (Type.BOOL, Type.INT, Type.FLOAT)
    return max(types, key=order.index)


def _number(types: tuple[Type, ...]) -> Type:
    """The result type of arithmetic on operands that may be booleans, which count as integers."""
    found = _promoted(types)
    return Type.INT if found is Type.BOOL else found


def _always(kind: Type) -> Rule:
    return lambda types: kind


def _chosen(types: tuple[Type, ...]) -> Type:
    return _promoted(types[1:])


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        count: Number of operands.
        result: Maps the operands' types to the type of the value.
        compute: The operation in torch, on tensors and numbers that broadcast.
        takes: The types that each operand may have.
    """

    count: int
    result: Rule
    compute: Callable[..., Any]
    takes: tuple[Type, ...] = (Type.BOOL, Type.INT, Type.FLOAT)


_WHOLE, _NUMBERS = (Type.BOOL, Type.INT), (Type.INT, Type.FLOAT)


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x: x.to(dtype) if isinstance(x, Tensor) else torch.tensor(x).to(dtype)


def _rounded(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x: _cast(dtype)(x).to(_wide(x))


def _wrapped(dtype: torch.dtype) -> Callable[..., Any]:
    """Brings integers to a narrower dtype, modulo its number of values; they stay int64."""
    return lambda x: _cast(dtype)(x).to(torch.int64)


def _wide(x: object) -> torch.dtype:
    return torch.float64 if isinstance(x, Tensor) and x.dtype == torch.float64 else torch.float32


def _float(x: Any) -> Tensor:
    """The operand in float32, or in float64 if it is float64."""
    wide: Tensor = _cast(_wide(x))(x)
    return wide


def _of_floats(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda x: function(_float(x))


# Range of elements for which oneDNN's tanh is faster, copies included: for fewer, the copies cost more than the
# arithmetic saves, and for more, fresh memory does.  Its relative error is at most 7.9e-8, that of torch's 6.0e-8; on
# CPUs other than x86 oneDNN computes another function.
_ONEDNN_FEWEST, _ONEDNN_MOST = 1 << 14, 1 << 17


@cache
def _onednn_on_x86() -> bool:
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _tanh(x: Tensor) -> Tensor:
    """tanh, 2.8 times as fast as torch's where that calls MKL (Zen 4, with AVX-512)."""
    fits = x.dtype == torch.float32 and _ONEDNN_FEWEST <= x.numel() <= _ONEDNN_MOST
    if fits and x.device.type == "cpu" and _onednn_on_x86():
        return torch.tanh(x.reshape(-1).to_mkldnn()).to_dense().view(x.shape)
    return torch.tanh(x)


def _minimum(x: Any, y: Any) -> Any:
    return torch.where(torch.as_tensor((x < y) | _is_nan(x)), x, y)


def _maximum(x: Any, y: Any) -> Any:
    return torch.where(torch.as_tensor((x > y) | _is_nan(x)), x, y)


def _is_nan(x: Any) -> Any:
    return x != x if not isinstance(x, Tensor) or x.is_floating_point() else False


OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, _number, operator.add),
    "sub": Operation(2, _number, operator.sub, _NUMBERS),
    "mul": Operation(2, _number, operator.mul),
    "div": Operation(2, _always(Type.FLOAT), lambda x, y: torch.true_divide(torch.as_tensor(x), y)),
    "floordiv": Operation(2, _number, lambda x, y: torch.floor_divide(torch.as_tensor(x), y)),
    "mod": Operation(2, _number, lambda x, y: torch.remainder(torch.as_tensor(x), y)),
    "pow": Operation(2, _always(Type.FLOAT), lambda x, y: torch.pow(_float(x), y)),
    "neg": Operation(1, _number, operator.neg, _NUMBERS),
    "abs": Operation(1, _number, operator.abs, _NUMBERS),
    "min": Operation(2, _promoted, _minimum),
    "max": Operation(2, _promoted, _maximum),
    "lt": Operation(2, _always(Type.BOOL), operator.lt),
    "le": Operation(2, _always(Type.BOOL), operator.le),
    "gt": Operation(2, _always(Type.BOOL), operator.gt),
    "ge": Operation(2, _always(Type.BOOL), operator.ge),
    "eq": Operation(2, _always(Type.BOOL), operator.eq),
    "ne": Operation(2, _always(Type.BOOL), operator.ne),
    "and": Operation(2, _promoted, operator.and_, _WHOLE),
    "or": Operation(2, _promoted, operator.or_, _WHOLE),
    "xor": Operation(2, _promoted, operator.xor, _WHOLE),
    "not": Operation(1, _promoted, lambda x: ~torch.as_tensor(x), _WHOLE),
    "shl": Operation(2, _number, operator.lshift, _WHOLE),
    "shr": Operation(2, _number, operator.rshift, _WHOLE),
    "where": Operation(3, _chosen, torch.where),
    "bool": Operation(1, _always(Type.BOOL), _cast(torch.bool)),
    "int": Operation(1, _always(Type.INT), _cast(torch.int64)),
    "int32": Operation(1, _always(Type.INT), _wrapped(torch.int32)),
    "int16": Operation(1, _always(Type.INT), _wrapped(torch.int16)),
    "int8": Operation(1, _always(Type.INT), _wrapped(torch.int8)),
    "uint8": Operation(1, _always(Type.INT), _wrapped(torch.uint8)),
    "float": Operation(1, _always(Type.FLOAT), _float),
    "bfloat16": Operation(1, _always(Type.FLOAT), _rounded(torch.bfloat16)),
    "float16": Operation(1, _always(Type.FLOAT), _rounded(torch.float16)),
    "exp": Operation(1, _always(Type.FLOAT), _of_floats(torch.exp)),
    "exp2": Operation(1, _always(Type.FLOAT), _of_floats(torch.exp2)),
    "log": Operation(1, _always(Type.FLOAT), _of_floats(torch.log)),
    "log2": Operation(1, _always(Type.FLOAT), _of_floats(torch.log2)),
    "log1p": Operation(1, _always(Type.FLOAT), _of_floats(torch.log1p)),
    "tanh": Operation(1, _always(Type.FLOAT), _of_floats(_tanh)),
    "sigmoid": Operation(1, _always(Type.FLOAT), _of_floats(torch.sigmoid)),
    "logsigmoid": Operation(1, _always(Type.FLOAT), _of_floats(torch.nn.functional.logsigmoid)),
    "sqrt": Operation(1, _always(Type.FLOAT), _of_floats(torch.sqrt)),
    "rsqrt": Operation(1, _always(Type.FLOAT), _of_floats(torch.rsqrt)),
    "sin": Operation(1, _always(Type.FLOAT), _of_floats(torch.sin)),
    "cos": Operation(1, _always(Type.FLOAT), _of_floats(torch.cos)),
    "floor": Operation(1, _always(Type.FLOAT), _of_floats(torch.floor), _NUMBERS),
    "ceil": Operation(1, _always(Type.FLOAT), _of_floats(torch.ceil), _NUMBERS),
    "round": Operation(1, _always(Type.FLOAT), _of_floats(torch.round), _NUMBERS),
    "trunc": Operation(1, _always(Type.FLOAT), _of_floats(torch.trunc), _NUMBERS),
}

# Operations by other names of the same function in torch and Python; ``x.add_(y)`` and the like are refused.
_NAMES: dict[str, str] = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "subtract": "sub",
    "multiply": "mul",
    "negative": "neg",
    "absolute": "abs",
    "minimum": "min",
    "maximum": "max",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
    "and_": "and",
    "or_": "or",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "not",
    "invert": "not",
    "inv": "not",
    "lshift": "shl",
    "rshift": "shr",
    "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr",
    "half": "float16",
    "double": "float",
    "fix": "trunc",
    "log_sigmoid": "logsigmoid",
}


def named(name: str) -> str | None:
    """The operation that torch or Python calls ``name``; None if expressions lack it."""
    plain = name.strip("_") if name.startswith("__") else name
    found = _NAMES.get(plain, plain)
    return found if found in OPERATIONS else None


# The operation that casts to each dtype.
CASTS: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.float32: "float",
    torch.float64: "float",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
