"""Variants for the kernels: a header that computes their expressions.

A variant's values, which are its numbers and the addresses of its captured tensors, are words in the GPU's memory
(``variant_words``).  No value is compiled in, so other values, shapes and strides run in the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from prefixkit.attention.variants.expression import ARGUMENTS, Expression, Node, Type
from prefixkit.attention.variants.slopes import slope_of
from prefixkit.attention.variants.variant import Variant
from prefixkit.backends.cuda.variants.range_header import ANYTHING, range_function
from prefixkit.backends.cuda.variants.variant_flags import Flags
from prefixkit.ops.arguments import BadShape

HEADER = "variant_body.cuh"
# Positions, sequence numbers, heads and numbers are below 2**28, so sums of eight fit 32 bits; larger numbers take 64.
_POSITION_BITS = 28
_ARGUMENTS = "float score, int b, int h, int q_idx, int kv_idx, const int* words"
# A key's position is passed in two parts; the second is a compile-time constant of the kernel.
_SCORE_ARGUMENTS = "float score, int b, int h, int q_idx, int kv_base, int kv_offset, const int* words"
_SCORE_TEMPLATE = f"{_SCORE_ARGUMENTS}, By& tanh"
_SCORE = ARGUMENTS.index("score")
_NAMES = dict(zip(ARGUMENTS, ("score", "b", "h", "q_idx", "kv_idx"), strict=True))
_ELEMENTS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "BFloat",
    torch.float16: "Half",
    torch.int64: "long long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}
# Bits of the magnitude of an integer element, by dtype; 63 for 64-bit numbers.
_ELEMENT_BITS = {torch.int64: 63, torch.int32: 31, torch.int16: 15, torch.int8: 8, torch.uint8: 8}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_INFIX |= {"and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"}
_NARROW = {"int32": "int", "int16": "short", "int8": "signed char", "uint8": "unsigned char"}
_OF_FLOATS = {
    "pow": "powf",
    "exp": "expf",
    "exp2": "exp2f",
    "log": "logf",
    "log2": "log2f",
    "log1p": "log1pf",
    "tanh": "variant_tanh",
    "sigmoid": "variant_sigmoid",
    "logsigmoid": "variant_log_sigmoid",
    "sqrt": "sqrtf",
    "rsqrt": "rsqrtf",
    "sin": "sinf",
    "cos": "cosf",
    "floor": "floorf",
    "ceil": "ceilf",
    "round": "rintf",
    "trunc": "truncf",
    "bfloat16": "round_to_bfloat16",
    "float16": "round_to_float16",
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def header(variant: Variant) -> str | None:
    """The text of ``struct Variant``; None for plain causal attention, which is in the template.

    Variants with the same code give the same text, whatever their values.
    """
    assert variant.traced, f"{variant.name} was not traced"
    if not variant.mods and not variant.has_sinks:
        return None
    words = count()
    of_scores, of_masks = (
        [(mod.expression, _places(mod.expression, words)) for mod in mods if mod.expression is not None]
        for mods in (variant.score_mods, variant.mask_mods)
    )
    scores = [_function(f"score{i}", "float", *each) for i, each in enumerate(of_scores)]
    masks = [_function(f"mask{i}", "bool", *each) for i, each in enumerate(of_masks)]
    ranges = {
        i: text
        for i, (expression, places) in enumerate(of_masks)
        if (text := range_function(f"range{i}", expression, places.scalars))
    }
    slopes = [
        _function(f"slope{i}", "float", slope, places)
        for i, (expression, places) in enumerate(of_scores)
        if (slope := slope_of(expression))
    ]
    if variant.approximate:
        scores = [text.replace("variant_sigmoid(", "hardware_sigmoid(") for text in scores]
    changed = "".join(
        f"        score = score{i}(score, b, h, q_idx, kv_base, kv_offset, words, tanh);\n" for i in range(len(scores))
    )
    shown = " && ".join(f"mask{i}(0.f, b, h, q_idx, kv_idx, words)" for i in range(len(masks))) or "true"
    each = (f"range{i}(q_idx, kv_idx, words)" if i in ranges else ANYTHING for i in range(len(masks)))
    decided = " & ".join(each) or ANYTHING
    flags = Flags(
        linear=0 < len(slopes) == len(scores), decides=bool(ranges), has_tanh=any("tanh(" in text for text in scores)
    )
    sloped = " + ".join(f"slope{i}(0.f, b, h, q_idx, 0, 0, words, tanh)" for i in range(len(slopes) * flags.linear))
    return f"""#pragma once
#include "attention/variant_functions.cuh"
#include "attention/variant_ranges.cuh"
namespace prefixkit {{
struct Variant {{
{flags.text(variant)}{"".join((*scores, *masks, *(slopes if flags.linear else ()), *ranges.values()))}
    template <class By> static DEVICE float score_by({_SCORE_TEMPLATE}) {{
{changed}        return score;
    }}
    static DEVICE float score({_SCORE_ARGUMENTS}) {{
        Tanh tanh;
        return score_by(score, b, h, q_idx, kv_base, kv_offset, words, tanh);
    }}
    static DEVICE bool mask(int b, int h, int q_idx, int kv_idx, const int* words) {{
        return {shown};
    }}
    static DEVICE Maybe decide(Range q_idx, Range kv_idx, const int* words) {{
        return {decided};
    }}
    static DEVICE float slope(int b, int h, int q_idx, const int* words) {{
        [[maybe_unused]] Tanh tanh;
        return {sloped or "0.f"};
    }}
}};
}}  // namespace prefixkit
"""


@dataclass(frozen=True)
class _Value:
    """A value in C++: its variable, its type, and for integers the bits of its largest magnitude.

    ``slope``: for integers that are ``base + slope * kv_offset``; else 0.
    """

    text: str
    type: Type
    bits: int = 0
    positive: bool = False  # or 0, as positions and heads are
    base: str = ""
    slope: int = 0
    of_score: bool = False  # it depends on the score

    @property
    def declared(self) -> str:
        if self.type is not Type.INT:
            return str(self.type.value)
        return "long long" if self.bits > 31 else "int"

    @property
    def as_float(self) -> str:
        """The value as float: for a constant offset one conversion serves all keys of a KV tile.

        A conversion takes as long as eight multiplications.  Below 2^24 both ways are exact.
        """
        if self.type is Type.FLOAT:
            return self.text
        if not self.slope:
            return f"float({self.text})"
        return f"(float({self.base}) + {float(self.slope)}f * float(kv_offset))"


@dataclass(frozen=True)
class _Places:
    """The words of a function's numbers, and of its captured tensors."""

    scalars: list[list[int]]
    tensors: list[list[int]]


def _places(expression: Expression, words: Iterator[int]) -> _Places:
    """``words`` numbers the words of the values of a variant's functions, one function after the other."""
    scalars = [[next(words) for _ in range(_scalar_words(scalar))] for scalar in expression.scalars]
    tensors = [[next(words) for _ in range(2 + 2 * captured.tensor.ndim)] for captured in expression.tensors]
    return _Places(scalars, tensors)


def _function(name: str, result: str, expression: Expression, places: _Places) -> str:
    of_scores, values, lines = result == "float", list[_Value](), list[str]()
    if of_scores:
        lines.append("        [[maybe_unused]] const int kv_idx = kv_base + kv_offset;\n")
    for number, node in enumerate(expression.nodes):
        args = [values[arg] for arg in node.args]
        value = _value(expression, node, args, places.scalars, places.tensors)
        lines.append(f"        [[maybe_unused]] const {value.declared} x{number} = {value.text};\n")
        if of_scores and (slope := _slope(node, args)) and value.bits <= 31:
            bases = [replace(arg, text=arg.base if arg.slope else arg.text) for arg in args]
            base = _value(expression, node, bases, places.scalars, places.tensors).text if args else "kv_base"
            lines.append(f"        [[maybe_unused]] const int y{number} = {base};\n")
            value = replace(value, base=f"y{number}", slope=slope)
        of_score = (node.op, node.slot) == ("argument", _SCORE) or any(arg.of_score for arg in args)
        values.append(replace(value, text=f"x{number}", of_score=of_score))
    body, template, given = "".join(lines), "", _ARGUMENTS
    if of_scores:
        body, template, given = body.replace("variant_tanh(", "tanh("), "template <class By> ", _SCORE_TEMPLATE
    return f"    {template}static DEVICE {result} {name}({given}) {{\n{body}        return {values[-1].text};\n    }}\n"


def _slope(node: Node, args: list[_Value]) -> int:
    """The amount by which an integer grows with a key's position, if it is constant; 0 if it is not known."""
    if node.type is not Type.INT:
        return 0
    if node.op == "argument":
        return int(ARGUMENTS[node.slot] == "kv_idx")
    if node.op == "neg":
        return -args[0].slope
    if node.op in ("add", "sub"):
        return args[0].slope + (args[1].slope if node.op == "add" else -args[1].slope)
    return 0


def _value(
    expression: Expression, node: Node, args: list[_Value], scalars: list[list[int]], tensors: list[list[int]]
) -> _Value:
    if node.op == "argument":
        return _Value(_NAMES[ARGUMENTS[node.slot]], node.type, _POSITION_BITS, positive=node.type is Type.INT)
    if node.op == "scalar":
        return _scalar(expression.scalars[node.slot], node.type, scalars[node.slot])
    if node.op == "load":
        return _load(expression.tensors[node.slot].tensor, node.type, args, tensors[node.slot])
    if node.op in ("floordiv", "mod", "div"):
        divisor = expression.nodes[node.args[1]]
        known = divisor.op == "scalar" and expression.scalars[divisor.slot] > 0
        if node.type is Type.INT:
            return _division(node.op, args, scalars[divisor.slot] if known else None)
        # Scores are multiplied by the reciprocal; what integers are divided by must be exact, as masks compare it.
        if node.op == "div" and known and args[0].of_score and expression.nodes[node.args[0]].op != "float":
            return _Value(f"divide_by_number({args[0].text}, words + {scalars[divisor.slot][0]})", Type.FLOAT)
    return _operation(node, args)


# The words of a number: two for itself, the second of a float being its reciprocal; an integer's division words follow.
_NUMBER_WORDS, _MAGIC_WORDS = 2, 3


def _scalar_words(scalar: bool | int | float) -> int:
    return _NUMBER_WORDS + (_MAGIC_WORDS if Type.of(scalar) is Type.INT else 0)


def _is_wide(scalar: int) -> bool:
    """Whether a number takes 64 bits in kernels; such numbers are few, and the type is part of the text."""
    return abs(scalar) >= 1 << _POSITION_BITS


def _scalar(scalar: bool | int | float, kind: Type, at: list[int]) -> _Value:
    if kind is Type.FLOAT:
        return _Value(f"__int_as_float(words[{at[0]}])", kind)
    if kind is Type.BOOL:
        return _Value(f"words[{at[0]}] != 0", kind)
    if _is_wide(int(scalar)):
        return _Value(f"long_word(words + {at[0]})", kind, 63)
    return _Value(f"words[{at[0]}]", kind, _POSITION_BITS)


def _load(tensor: Tensor, kind: Type, indices: list[_Value], at: list[int]) -> _Value:
    """An element of a captured tensor, whose words are a pointer (two), then size and stride of each dimension."""
    element = _ELEMENTS.get(tensor.dtype)
    if element is None:
        raise BadShape(f"tree_attention: a variant captures a tensor of {tensor.dtype}, which kernels do not read")
    terms = [
        f"{'index_from_start' if index.positive and index.bits <= 31 else 'index_of'}({index.text}, "
        f"words[{at[2 + 2 * i]}]) * (long long)words[{at[3 + 2 * i]}]"
        for i, index in enumerate(indices)
    ]
    read = f"element((const {element}*)long_word(words + {at[0]}), {' + '.join(terms) or '0'})"
    return _Value(read, kind, _ELEMENT_BITS.get(tensor.dtype, 0))


def _division(op: str, args: list[_Value], known: list[int] | None) -> _Value:
    """Division that rounds down; by precomputed words if the divisor is a number."""
    x, y = args
    name = {"floordiv": "floor_divide", "mod": "floor_modulo"}[op]
    if known is not None and x.bits <= 31 and y.bits <= 31:
        by = name.removeprefix("floor_") if x.positive else name
        bits = x.bits if op == "floordiv" else y.bits
        return _Value(f"{by}_by({x.text}, words + {known[0]})", Type.INT, bits, positive=x.positive or op == "mod")
    bits = max(x.bits, y.bits)
    return _Value(f"{name}({_wide(x, bits)}, {_wide(y, bits)})", Type.INT, bits)


def _wide(value: _Value, bits: int) -> str:
    return f"(long long){value.text}" if bits > 31 else value.text


def _operation(node: Node, args: list[_Value]) -> _Value:
    op, kind = node.op, node.type
    bits = max((arg.bits for arg in args if arg.type is Type.INT), default=0)
    grown = {"add": bits + 1, "sub": bits + 1, "mul": 63, "shl": 63}
    if op in _INFIX:
        if kind is Type.INT:
            bits = min(grown.get(op, bits), 63)
        if kind is Type.INT:
            operands = [_wide(arg, bits) for arg in args]
        else:
            operands = [arg.as_float if kind is Type.FLOAT else arg.text for arg in args]
        positive = op in ("add", "mul", "and", "or") and all(arg.positive for arg in args)
        return _Value(f"{operands[0]} {_INFIX[op]} {operands[1]}", kind, bits, positive)
    texts = [arg.text for arg in args]
    if op in ("bool", "int", "float"):
        return (
            _Value(_cast(args[0], kind), kind, 1 if args[0].type is Type.BOOL else 63 if op == "int" else 0)
            if (args[0].type is not kind)
            else args[0]
        )
    if op in _NARROW:
        return _Value(f"({_NARROW[op]}){texts[0]}", kind, _ELEMENT_BITS[getattr(torch, op)])
    if op == "where":
        return _Value(f"{texts[0]} ? {texts[1]} : {texts[2]}", kind, bits)
    if op in ("min", "max"):
        x, y = texts
        or_nan = f" || {x} != {x}" if kind is Type.FLOAT else ""
        return _Value(f"{x} {'<' if op == 'min' else '>'} {y}{or_nan} ? {x} : {y}", kind, bits)
    if op == "neg":
        return _Value(f"-{texts[0]}", kind, bits)
    if op == "abs":
        return _Value(
            f"fabsf({texts[0]})" if kind is Type.FLOAT else f"{texts[0]} < 0 ? -{texts[0]} : {texts[0]}", kind, bits
        )
    if op == "not":
        return _Value(f"!{texts[0]}" if kind is Type.BOOL else f"~{texts[0]}", kind, bits)
    if op == "div":
        return _Value(f"{texts[0]} / {texts[1]}", kind)
    if op in ("floordiv", "mod"):
        return _Value(f"float_{op}({texts[0]}, {texts[1]})", kind)
    floats = ", ".join(arg.as_float for arg in args)
    return _Value(f"{_OF_FLOATS[op]}({floats})", kind)


def _cast(value: _Value, kind: Type) -> str:
    if kind is Type.BOOL:
        return f"{value.text} != 0"
    return f"(long long){value.text}" if kind is Type.INT else value.as_float
