"""Structs that Python and kernels share: one definition gives the packer and the C++ header.

The header asserts the offset of every field, so a kernel whose struct differs from the packer's does not compile.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixkit.cuda.jit import Function

# C types and their codes in the module ``struct``.  Each has one size on every host of CUDA.
_CODES = {"int": "i", "unsigned int": "I", "long long": "q", "unsigned long long": "Q", "float": "f", "double": "d"}

# NVRTC has no offsetof; its front end has an operator that computes offsets.
_OFFSET = """#ifdef __CUDACC_RTC__
#define LAYOUT_OFFSET(type, path) __INTADDR__(&((type*)0)->path)
#else
#define LAYOUT_OFFSET(type, path) __builtin_offsetof(type, path)
#endif
"""
_NO_OFFSET = "#undef LAYOUT_OFFSET\n"


@dataclass(frozen=True)
class Leaf:
    """A number, pointer or opaque value."""

    path: str  # in the struct, such as ``cost[1].kv_tile``; empty for a leaf that is in no struct
    code: str  # its type, for the module ``struct``
    offset: int  # in bytes


@dataclass(frozen=True)
class Opaque:
    """A type that Python does not look into; the value of such a field is ``size`` bytes."""

    name: str
    size: int
    alignment: int

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return (Leaf("", f"{self.size}s", 0),)

    @property
    def definitions(self) -> dict[str, None]:
        """Its definition in C++."""
        return {f"struct alignas({self.alignment}) {self.name} {{ unsigned char bytes[{self.size}]; }};\n": None}


# CUtensorMap of the driver's header.
TENSOR_MAP = Opaque("TensorMap", 128, 64)


@dataclass(frozen=True)
class Field:
    """A field, of a type of C (a number, or any pointer, which ends with ``*``), or of another definition."""

    type: str | Opaque | Struct
    name: str
    count: int = 0  # elements of an array; 0 if it is no array
    note: str = ""  # a comment in the header

    @property
    def layout(self) -> tuple[int, int, tuple[Leaf, ...]]:
        """Size, alignment and leaves of one element."""
        if not isinstance(self.type, str):
            return self.type.size, self.type.alignment, self.type.leaves
        code = "P" if self.type.endswith("*") else _CODES[self.type]
        return struct.calcsize(code), struct.calcsize(code), (Leaf("", code, 0),)

    @property
    def declaration(self) -> str:
        """Its line in C++."""
        kind = self.type if isinstance(self.type, str) else self.type.name
        array = f"[{self.count}]" if self.count else ""
        return f"    {kind} {self.name}{array};" + (f"  // {self.note}" if self.note else "")


@dataclass(frozen=True)
class Struct:
    """A struct of the namespace ``prefixkit``, with the layout of C++."""

    name: str
    fields: tuple[Field, ...]

    @cached_property
    def alignment(self) -> int:
        """In bytes."""
        return max(field.layout[1] for field in self.fields)

    @cached_property
    def size(self) -> int:
        """In bytes, padding at the end included."""
        last = self.leaves[-1]
        return _aligned(last.offset + struct.calcsize(last.code), self.alignment)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The values that the packer writes, in order."""
        leaves, end = [], 0
        for field in self.fields:
            size, alignment, inner = field.layout
            end = _aligned(end, alignment)
            for element in range(max(field.count, 1)):
                path = f"{field.name}[{element}]" if field.count else field.name
                dot = "." if isinstance(field.type, Struct) else ""
                leaves += [Leaf(path + dot + leaf.path, leaf.code, end + leaf.offset) for leaf in inner]
                end += size
        return tuple(leaves)

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
        body = "\n".join(self.definitions)
        text = f"#pragma once\n{_OFFSET}namespace prefixkit {{\n{body}}}  // namespace prefixkit\n{_NO_OFFSET}"
        return f"layouts/{name}.h", text

    @property
    def definitions(self) -> dict[str, None]:
        """The C++ definitions of its fields' types, each once, then its own, and assertions of its layout."""
        inner = {
            text: None for field in self.fields if not isinstance(field.type, str) for text in field.type.definitions
        }
        lines = [f"struct {self.name} {{", *(field.declaration for field in self.fields), "};"]
        places = [
            (f"LAYOUT_OFFSET({self.name}, {leaf.path})", leaf.offset, f"{self.name}.{leaf.path}")
            for leaf in self.leaves
        ]
        places.append((f"sizeof({self.name})", self.size, f"size of {self.name}"))
        lines += [f'static_assert({what} == {value}, "{name}");' for what, value, name in places]
        return {**inner, "\n".join(lines) + "\n": None}

    def check(self, function: Function) -> Function:
        """The kernel; AssertionError unless its parameter has this struct's size."""
        theirs = function.parameter_bytes
        assert theirs == self.size, f"{function.name} takes {theirs} bytes, but {self.name} has {self.size}"
        return function


def define(name: str, *rows: tuple[str | Opaque | Struct, str] | tuple[str | Opaque | Struct, str, str]) -> Struct:
    """A struct from rows of a type, names of that type, and a comment: ``("int", "heads size[2]", "of a layer")``.

    Raises:
        ValueError: a type has no code, or a name is used twice.
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
