"""Structs that Python and kernels share: one definition gives the packer and the C++ header.

The header asserts where the compiler places every field: a kernel whose struct differs from the packer's does not
compile.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixkit.cuda.jit import Function

# C types and their codes in the module ``struct``.  Each has one size on every host of CUDA.
_CODES = {
    "int": "i",
    "unsigned int": "I",
    "long long": "q",
    "unsigned long long": "Q",
    "float": "f",
    "double": "d",
}


@dataclass(frozen=True)
class Opaque:
    """A type that Python does not look into; the value of such a field is ``size`` bytes."""

    name: str
    size: int
    alignment: int

    @property
    def definition(self) -> str:
        """Its definition in C++."""
        return f"struct alignas({self.alignment}) {self.name} {{ unsigned char bytes[{self.size}]; }};\n"


# NVRTC has no offsetof; its front end computes one by an operator of its own.
_OFFSET = """#ifdef __CUDACC_RTC__
#define LAYOUT_OFFSET(type, path) __INTADDR__(&((type*)0)->path)
#else
#define LAYOUT_OFFSET(type, path) __builtin_offsetof(type, path)
#endif
"""
_NO_OFFSET = "#undef LAYOUT_OFFSET\n"

# CUtensorMap of the driver's header.
TENSOR_MAP = Opaque("TensorMap", 128, 64)


@dataclass(frozen=True)
class Field:
    """A field.

    Attributes:
        type: A type of C (a number, or any pointer, which ends with ``*``), or another definition.
        name: Its name.
        count: Elements of an array; 0 for what is no array.
        note: A comment for the header.
    """

    type: str | Opaque | Struct
    name: str
    count: int = 0
    note: str = ""


@dataclass(frozen=True)
class Leaf:
    """A number, pointer or opaque value.

    Attributes:
        path: Where it is in the struct, such as ``cost[1].unit``.
        code: Its type, for the module ``struct``.
        offset: In bytes.
    """

    path: str
    code: str
    offset: int


@dataclass(frozen=True)
class Struct:
    """A struct of the namespace ``prefixkit``, laid out as C++ does it.

    Attributes:
        name: Its name in C++.
        fields: In order.
    """

    name: str
    fields: tuple[Field, ...]

    @cached_property
    def alignment(self) -> int:
        """In bytes."""
        return max(_size_and_alignment(field)[1] for field in self.fields)

    @cached_property
    def size(self) -> int:
        """In bytes, padding at the end included."""
        last, offset = list(self._placed())[-1]
        return _aligned(offset + _size_and_alignment(last)[0] * max(last.count, 1), self.alignment)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """What a packer writes, in order."""
        return tuple(leaf for field, offset in self._placed() for leaf in _leaves(field, offset))

    @cached_property
    def packer(self) -> struct.Struct:
        """Packs a value for each of :attr:`leaves`, by position, into ``size`` bytes; padding is zero."""
        text, end = "@", 0
        for leaf in self.leaves:
            text += "x" * (leaf.offset - end) + leaf.code
            end = leaf.offset + struct.calcsize(leaf.code)
        return struct.Struct(text + "x" * (self.size - end))

    @cached_property
    def header(self) -> tuple[str, str]:
        """Name and text of the C++ header that defines this struct and those in it, for ``Unit.headers``."""
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()
        body = "\n".join(dict.fromkeys(_definitions(self)))
        text = f"#pragma once\n{_OFFSET}namespace prefixkit {{\n{body}}}  // namespace prefixkit\n{_NO_OFFSET}"
        return f"layouts/{name}.h", text

    @property
    def definition(self) -> str:
        """Its definition in C++, and assertions of its layout."""
        lines = [f"struct {self.name} {{", *map(_declaration, self.fields), "};"]
        lines += [
            _assertion(f"LAYOUT_OFFSET({self.name}, {leaf.path})", leaf.offset, f"{self.name}.{leaf.path}")
            for leaf in self.leaves
        ]
        lines.append(_assertion(f"sizeof({self.name})", self.size, f"size of {self.name}"))
        return "\n".join(lines) + "\n"

    def check(self, function: Function) -> None:
        """AssertionError unless the kernel's parameter has this struct's size."""
        theirs = function.parameter_bytes
        assert theirs == self.size, f"{function.name} takes {theirs} bytes, but {self.name} has {self.size}"

    def _placed(self) -> Iterator[tuple[Field, int]]:
        end = 0
        for field in self.fields:
            size, alignment = _size_and_alignment(field)
            offset = _aligned(end, alignment)
            yield field, offset
            end = offset + size * max(field.count, 1)


def define(name: str, *rows: tuple[str | Opaque | Struct, str] | tuple[str | Opaque | Struct, str, str]) -> Struct:
    """A struct from rows of a type, names of that type, and a comment: ``("int", "heads size[2]", "of a layer")``.

    Raises:
        ValueError: A type that has no code, or a name that is used twice.
    """
    fields = []
    for kind, names, *note in rows:
        if isinstance(kind, str) and kind not in _CODES and not kind.endswith("*"):
            raise ValueError(
                f"{name}: {kind!r} is no type of a field; use a pointer, a definition or one of {[*_CODES]}"
            )
        for place, text in enumerate(names.split()):
            plain, _, count = text.rstrip("]").partition("[")
            fields.append(Field(kind, plain, int(count or 0), note[0] if note and not place else ""))
    if len({field.name for field in fields}) < len(fields):
        raise ValueError(f"{name}: fields need different names, got {[field.name for field in fields]}")
    return Struct(name, tuple(fields))


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _code(kind: str) -> str:
    return "P" if kind.endswith("*") else _CODES[kind]


def _size_and_alignment(field: Field) -> tuple[int, int]:
    """Of one element."""
    if isinstance(field.type, str):
        size = struct.calcsize(_code(field.type))
        return size, size
    return field.type.size, field.type.alignment


def _leaves(field: Field, offset: int) -> Iterator[Leaf]:
    size, _ = _size_and_alignment(field)
    for element in range(max(field.count, 1)):
        path, at = f"{field.name}[{element}]" if field.count else field.name, offset + element * size
        if isinstance(field.type, Struct):
            yield from (Leaf(f"{path}.{leaf.path}", leaf.code, at + leaf.offset) for leaf in field.type.leaves)
        else:
            yield Leaf(path, _code(field.type) if isinstance(field.type, str) else f"{size}s", at)


def _definitions(defined: Opaque | Struct) -> Iterator[str]:
    if isinstance(defined, Struct):
        for field in defined.fields:
            if not isinstance(field.type, str):
                yield from _definitions(field.type)
    yield defined.definition


def _declaration(field: Field) -> str:
    kind = field.type if isinstance(field.type, str) else field.type.name
    array = f"[{field.count}]" if field.count else ""
    return f"    {kind} {field.name}{array};" + (f"  // {field.note}" if field.note else "")


def _assertion(what: str, value: int, name: str) -> str:
    return f'static_assert({what} == {value}, "{name}");'
