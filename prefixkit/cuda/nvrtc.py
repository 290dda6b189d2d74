"""Compile CUDA sources by NVRTC, through cuda-core.  This needs no GPU, no host compiler and no CUDA toolkit.

cuda-core is imported inside functions only, because it is optional, and takes 0.2 s to import.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

CSRC = Path(__file__).parents[1] / "csrc"
REMEDY = "pip install 'prefixkit[cuda]'"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)

# ptxas reports each kernel's registers and spills, at no cost.
_FLAGS = {"std": "c++17", "lineinfo": True, "ptxas_options": ["-v"]}
FLAGS = repr(_FLAGS)  # for the cache's key


class CompileError(RuntimeError):
    """NVRTC could not compile a source."""


class NvrtcMissing(ImportError):
    """cuda-core or NVRTC is not installed, or does not load."""


class UnsupportedArch(ValueError):
    """The kernels, or this version of NVRTC, do not support a GPU."""


@dataclass(frozen=True)
class Unit:
    """A translation unit: instantiations of one source file.

    Attributes:
        file: Name of the source in ``root``.
        names: C++ name expressions of its kernels, such as ``"prefixkit::kv_append<uint4>"``.
        defines: ``(macro, value)`` pairs.
        headers: ``(name, text)`` of generated headers, which are not in ``root``.
        root: The folder of the source and of all it includes.
    """

    file: str
    names: tuple[str, ...]
    defines: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    root: Path = CSRC

    def __str__(self) -> str:
        options = "".join(f" -D{name}={value}" for name, value in self.defines)
        more = f", and {len(self.names) - 2} more" if len(self.names) > 2 else ""
        return f"{self.file}{options} ({', '.join(self.names[:2])}{more})"


@dataclass(frozen=True)
class Binary:
    """Machine code of a unit."""

    cubin: bytes  # the file that the driver loads
    symbols: dict[str, str]  # by name expression, the symbol in the cubin
    log: str = ""  # output of NVRTC and ptxas: each kernel's registers and spills


def sources(unit: Unit) -> dict[str, str]:
    """The unit's file and all that it includes with quotes, by name, in a fixed order."""
    texts = dict(unit.headers)
    waiting = [unit.file, *(name for text in texts.values() for name in _INCLUDE.findall(text))]
    while waiting:
        name = waiting.pop()
        if name in texts:
            continue
        try:
            texts[name] = (unit.root / name).read_text()
        except OSError as error:
            raise CompileError(f"{unit.file} needs {name}, which cannot be read in {unit.root}: {error}") from error
        waiting += _INCLUDE.findall(texts[name])
    return dict(sorted(texts.items()))


@cache
def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC; NvrtcMissing if NVRTC or cuda-core is not installed."""
    try:
        import cuda.core
        from cuda.bindings import nvrtc

        del cuda
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # a missing package, or a library that does not load, which has its own exception types
        raise NvrtcMissing(f"cuda-core with NVRTC cannot be used ({error}); {REMEDY}") from error
    if int(status):
        raise NvrtcMissing(f"NVRTC answered {status}; {REMEDY}")
    return int(major), int(minor)


@cache
def supported_archs() -> tuple[int, ...]:
    """Compute capabilities that NVRTC compiles for, as ``10 * major + minor``, ascending."""
    nvrtc_version()
    from cuda.bindings import nvrtc

    error, archs = nvrtc.nvrtcGetSupportedArchs()
    assert not int(error), error
    return tuple(sorted(int(arch) for arch in archs))


def arch_for(capability: tuple[int, int], supported: tuple[int, ...]) -> str:
    """The target to compile for; its machine code also runs on later minor versions of the same major version.

    Raises:
        UnsupportedArch: the capability is below 8.0, or newer than NVRTC supports.
    """
    major, minor = capability
    if major < 8:
        raise UnsupportedArch(f"the kernels need compute capability 8.0 or later, this GPU has {major}.{minor}")
    known = [arch for arch in supported if arch // 10 == major and arch <= 10 * major + minor]
    if not known:
        raise UnsupportedArch(
            f"this GPU has compute capability {major}.{minor}, which this NVRTC does not know; install a newer one "
            f"({REMEDY} --upgrade)"
        )
    return "sm_90a" if max(known) == 90 else f"sm_{max(known)}"


def compile_unit(unit: Unit, arch: str) -> Binary:
    """Compile a unit for one target, such as ``"sm_90a"``.

    Raises:
        NvrtcMissing: cuda-core or NVRTC is not installed.
        CompileError: the source does not compile; with the compiler's output.
    """
    version, text, log = ".".join(map(str, nvrtc_version())), sources(unit)[unit.file], StringIO()
    from cuda.core import Program, ProgramOptions

    with TemporaryDirectory() as made:
        for name, header in unit.headers:
            (Path(made) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(made) / name).write_text(header)
        folders = [str(unit.root), made]
        options = ProgramOptions(
            name=unit.file, arch=arch, define_macro=list(unit.defines) or None, include_path=folders, **_FLAGS
        )
        try:
            code = Program(text, "c++", options).compile("cubin", name_expressions=unit.names, logs=log)
        except Exception as error:  # cuda-core has its own exception types, one per library
            raise CompileError(f"NVRTC {version} cannot compile {unit} for {arch}: {error}") from error
    symbols = {name: code.symbol_mapping[name] for name in unit.names}
    text_of = {name: of.decode() if isinstance(of, bytes) else str(of) for name, of in symbols.items()}
    return Binary(bytes(code.code), text_of, log.getvalue())
