"""Compile a kernel's own source for the CPU, with a header in place of the GPU's instructions, and what calls it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from prefixkit.cuda.nvrtc import CSRC

HERE = Path(__file__).parent
Headers = tuple[tuple[str, str], ...]
OPTIONS = (
    *("-std=c++17", "-Og", "-ffp-contract=off", "-shared", "-fPIC", "-w"),
    "-fvisibility-inlines-hidden",  # calls of inline functions need no table
    "-fno-gnu-unique",  # another emulated kernel in the same process has fibers of its own
)
LIBRARY = "ucontext.h", "cmath", "cstdint", "cstdlib", "cstring", "map", "memory", "type_traits", "vector"


def build(
    folder: Path, emulation: str, instead: Mapping[str, tuple[str, str]], headers: Headers, *defines: str
) -> ctypes.CDLL:
    """The library of the one ``.cpp`` in ``emulation``.

    Args:
        folder: Where it is made.
        emulation: A folder here, whose files take the place of those with the same path in csrc.
        instead: For a source, by its path in csrc, text in it and what takes its place.
        headers: Of the kernel's ``Unit``.
        defines: ``-D...``
    """
    shutil.copytree(CSRC, folder, dirs_exist_ok=True)
    write_headers(folder, headers)
    for name, (old, new) in instead.items():
        text = (folder / name).read_text()
        assert old in text, f"{name} no longer has {old!r}"
        (folder / name).write_text(text.replace(old, new))
    shutil.copytree(HERE / emulation, folder, dirs_exist_ok=True)
    for shared in HERE.glob("*.cuh"):
        shutil.copy(shared, folder)
    (main,) = folder.glob("*.cpp")
    library = main.with_suffix(".so")
    precompiled = Path(library_headers().name, "library.hpp")
    subprocess.run(["g++", *OPTIONS, *defines, "-include", precompiled, f"-I{folder}", "-o", library, main], check=True)
    return ctypes.CDLL(str(library))


@cache
def library_headers() -> TemporaryDirectory[str]:
    """A folder with the standard library's headers, compiled: to read them takes longer than most kernels do."""
    folder = TemporaryDirectory()
    header = Path(folder.name, "library.hpp")
    header.write_text("".join(f"#include <{name}>\n" for name in LIBRARY))
    subprocess.run(["g++", *OPTIONS, "-x", "c++-header", "-o", f"{header}.gch", header], check=True)
    return folder


def write_headers(folder: Path, headers: Headers) -> None:
    """Write the headers that are made, where the sources look for them."""
    for name, text in headers:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
