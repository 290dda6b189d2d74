"""Structs that Python and kernels share: what the packer writes, a C++ compiler reads, field by field."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess

import numpy as np
import pytest

from prefixkit.backends.cuda import layouts
from prefixkit.cuda.nvrtc import CompileError, NvrtcMissing, Unit, compile_unit, nvrtc_version
from prefixkit.cuda.struct_layout import Opaque, Struct, define
from prefixkit.ops.sampling_records import RECORD

INNER = define("Inner", ("int", "a"), ("double", "b"), ("float", "c"))
PADDED = define(
    "Padded",
    ("int", "first"),
    (Opaque("Wide", 48, 16), "wide[2]"),
    ("float", "x"),
    (INNER, "inner[2] last"),
    ("const float*", "pointer"),
    ("unsigned int", "u v[3]"),
    ("unsigned long long", "w"),
    ("int", "end"),
)
STRUCTS = {
    "padded": PADDED,
    **{name: value for name, value in vars(layouts).items() if isinstance(value, Struct)},
    **{f"ATTENTION {maps.name}": value for maps, value in layouts.ATTENTION.items()},
}
# What the headers name and do not define.
NAMES = "struct int4;\nnamespace prefixkit { struct SamplingRecord; }\n"
C_TYPES = {"i": "int", "I": "unsigned", "q": "long long", "Q": "unsigned long long", "f": "float", "d": "double"}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def value_of(number, code):
    """Of each field its own, the sign bit set where there is one."""
    if code in "fd":
        return -number - 0.5
    if code == "P":
        return 2**40 + number
    if code.endswith("s"):
        return bytes((number + i) % 256 for i in range(int(code[:-1])))
    return {"i": -number - 1, "I": 2**31 + number, "q": -(2**40) - number, "Q": 2**63 + number}[code]


def literal(value, code):
    if code == "P":
        return f"(const void*){value}ull"
    return f"{value}ull" if code in "IQ" else f"{value}ll" if code in "iq" else repr(value)


def reads(layout):
    """C++ that lists the paths of the fields that do not hold their value, each read as its own type."""
    lines = []
    for number, leaf in enumerate(layout.leaves):
        value = value_of(number, leaf.code)
        if leaf.code.endswith("s"):
            bytes_of = ", ".join(map(str, value))
            unequal = f"sizeof x != sizeof s.{leaf.path} || memcmp(x, &s.{leaf.path}, sizeof x)"
            test = f"unsigned char x[] = {{{bytes_of}}}; if ({unequal})"
        elif leaf.code == "P":
            test = f"if (s.{leaf.path} != {literal(value, 'P')})"
        else:
            kind, number = C_TYPES[leaf.code], literal(value, leaf.code)
            test = f"const {kind}& x = s.{leaf.path}; if (&x != &s.{leaf.path} || x != ({kind}){number})"
        lines.append(f'    {{ {test} strcat(wrong, "{leaf.path} "); }}')
    return "\n".join(lines)


def compile_with(folder, text, *options):
    source = folder / "reads.cpp"
    source.write_text(text)
    return subprocess.run(["g++", "-std=c++17", *options, source], capture_output=True, text=True)


@pytest.mark.drawn(4)
@needs_compiler
@pytest.mark.parametrize("name", STRUCTS)
def test_a_compiler_reads_in_each_field_what_the_packer_wrote(name, tmp_path):
    layout = STRUCTS[name]
    body = f"""#include <cstring>
{NAMES}{layout.header[1]}
extern "C" int wrong_fields(const prefixkit::{layout.name}& s, char* wrong) {{
{reads(layout)}
    return sizeof s;
}}
"""
    made = compile_with(tmp_path, body, "-shared", "-fPIC", "-o", tmp_path / "reads.so")
    assert made.returncode == 0, made.stderr
    packed = layout.packer.pack(*(value_of(number, leaf.code) for number, leaf in enumerate(layout.leaves)))
    wrong = ctypes.create_string_buffer(4096)
    library = ctypes.CDLL(str(tmp_path / "reads.so"))
    space = (ctypes.c_char * (len(packed) + 64))()
    at = -ctypes.addressof(space) % 64
    space[at : at + len(packed)] = packed
    place = ctypes.c_void_p(ctypes.addressof(space) + at)
    assert library.wrong_fields(place, wrong) == len(packed) == layout.size
    assert wrong.value == b""


@needs_compiler
def test_a_field_that_lies_elsewhere_does_not_compile(tmp_path):
    """The header's own assertions say which."""
    text = PADDED.header[1].replace("    int a;", "    long long before, a;")
    assert text != PADDED.header[1]
    made = compile_with(tmp_path, text, "-fsyntax-only")
    assert made.returncode and "Inner.b" in made.stderr and "Padded.inner[1].c" in made.stderr


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", STRUCTS)
def test_nvrtc_takes_the_header(name, tmp_path):
    try:
        nvrtc_version()
    except NvrtcMissing as missing:
        pytest.skip(str(missing))
    layout = STRUCTS[name]
    include = f'{NAMES}#include "{layout.header[0]}"\n'
    (tmp_path / "f.cu").write_text(f"{include}__global__ void f(prefixkit::{layout.name} s) {{}}\n")
    unit = Unit("f.cu", ("f",), headers=(layout.header,), root=tmp_path)
    assert compile_unit(unit, "sm_90a").cubin
    name, text = layout.header
    moved = text.replace(f"sizeof({layout.name}) == {layout.size}", f"sizeof({layout.name}) == {layout.size + 8}")
    with pytest.raises(CompileError, match=f"size of {layout.name}"):
        compile_unit(Unit("f.cu", ("f",), headers=((name, moved),), root=tmp_path), "sm_90a")


def test_padding_is_that_of_c():
    layout = define("Example", ("void*", "p"), ("int", "i j"), ("const int*", "q"), ("float", "f"))
    assert [leaf.offset for leaf in layout.leaves] == [0, 8, 12, 16, 24]
    assert (layout.size, layout.alignment) == (32, 8)
    assert layout.packer.pack(1, 2, 3, 4, 0.5) == struct.pack("@PiiPfxxxx", 1, 2, 3, 4, 0.5)


def test_the_kernels_read_the_records_that_the_host_writes():
    """What packs the struct writes the bytes of a record of a table."""
    table = np.zeros(3, dtype=RECORD)
    values = [value_of(number, leaf.code) for number, leaf in enumerate(layouts.SAMPLING_RECORD.leaves)]
    table[1] = tuple(values)
    size = layouts.SAMPLING_RECORD.size
    assert table.tobytes() == bytes(size) + layouts.SAMPLING_RECORD.packer.pack(*values) + bytes(size)


def test_bad_definitions_are_refused():
    with pytest.raises(ValueError, match="'short' is no type of a field"):
        define("Bad", ("short", "x"))
    with pytest.raises(ValueError, match="different names"):
        define("Bad", ("int", "x y"), ("float", "x"))


def test_a_kernel_whose_parameter_has_another_size_is_refused():
    class Function:
        name, parameter_bytes = "f", INNER.size + 4

    with pytest.raises(AssertionError, match="f takes 28 bytes, but Inner has 24"):
        INNER.check(Function())
