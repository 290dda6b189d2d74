"""Compile a kernel's own source for the CPU, with a header in place of the GPU's instructions, and what calls it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

FIBERS = Path(__file__).parent / "fibers.cuh"
OPTIONS = (
    *("-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-w"),
    "-fno-gnu-unique",  # another emulated kernel in the same process has fibers of its own
    "-U_FORTIFY_SOURCE",  # its longjmp stays on one stack
)


def build(
    folder: Path, sources: Iterable[Path], emulation: Path, instead: Mapping[str, tuple[str, str]], *defines: str
) -> ctypes.CDLL:
    """The library of the one ``.cpp`` in ``emulation``.

    Args:
        folder: Where it is made.
        sources: The kernel's.
        emulation: A folder whose files come beside them, in place of those with the same names.
        instead: For a source, text in it and what takes its place.
        defines: ``-D...``
    """
    for source in sources:
        old, new = instead.get(source.name, ("", ""))
        text = source.read_text()
        assert old in text, f"{source.name} no longer has {old!r}"
        (folder / source.name).write_text(text.replace(old, new) if old else text)
    for source in (*emulation.iterdir(), FIBERS):
        shutil.copy(source, folder)
    (main,) = folder.glob("*.cpp")
    library = main.with_suffix(".so")
    subprocess.run(["g++", *OPTIONS, *defines, "-o", library, main], check=True)
    return ctypes.CDLL(str(library))
