"""Compiling, and the cache of what was compiled.  NVRTC needs no GPU; without it these tests are skipped."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import resource
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from prefixkit.cuda import jit, kernel_cache, nvrtc
from prefixkit.cuda.nvrtc import Binary, CompileError, NvrtcMissing, Unit, UnsupportedArch, arch_for

try:
    nvrtc.nvrtc_version()
except NvrtcMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

COMPILE_ALL = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "compile_all.py"))
SOURCE = """
#include "scale.cuh"
namespace test {
template <int N> __global__ void __launch_bounds__(64) f(float* x) {
    __shared__ float shared[N];
    shared[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = SCALE * shared[N - 1 - threadIdx.x];
}
}
"""


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unit:
    """A source with a header, and an empty cache."""
    root = tmp_path / "csrc"
    root.mkdir()
    (root / "f.cu").write_text(SOURCE)
    (root / "scale.cuh").write_text("#pragma once\n#define SCALE 2.0f\n")
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path / "cache"))
    return Unit("f.cu", ("test::f<64>", "test::f<32>"), root=root)


class Processes:
    """Asks for machine code as one process after another would, each with a memory of its own.

    Attributes:
        compiled: The files that were really compiled, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        monkeypatch.setattr(jit, "compile_unit", self._compile)
        self.start()

    def start(self) -> None:
        """A new process: what the one before had in memory is gone."""
        jit.binary.cache_clear()

    def binary(self, unit: Unit) -> Binary:
        return jit.binary(unit, "sm_90a")

    def _compile(self, unit: Unit, arch: str) -> Binary:
        self.compiled.append(unit.file)
        return nvrtc.compile_unit(unit, arch)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_unit_becomes_machine_code_with_a_symbol_and_a_report_for_each_name(unit):
    made = nvrtc.compile_unit(unit, "sm_90a")
    assert made.cubin[:4] == b"\x7fELF"
    assert made.symbols == {"test::f<64>": "_ZN4test1fILi64EEEvPf", "test::f<32>": "_ZN4test1fILi32EEEvPf"}
    said = COMPILE_ALL["reports"](made.log)
    assert [said[symbol]["shared"] for symbol in made.symbols.values()] == [256, 128]
    assert all(0 < used["registers"] < 64 and used["spill_stores"] == 0 for used in said.values())
    assert not COMPILE_ALL["warnings"](made.log)


SERIALIZED = (
    "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
)


def test_what_makes_a_kernel_slow_counts_as_a_warning_though_the_assembler_only_notes_it():
    used = "ptxas info    : Used 8 registers, used 1 barriers, 256 bytes smem"
    assert COMPILE_ALL["warnings"](f"{used}\n{SERIALIZED}\n{used}") == [SERIALIZED]


def test_what_the_compiler_warns_of_is_kept_with_the_machine_code(unit):
    (unit.root / "f.cu").write_text(SOURCE.replace("__shared__", "int unused; __shared__"))
    made = nvrtc.compile_unit(unit, "sm_90a")
    place = kernel_cache.entry(unit, "sm_90a", (13, 0))
    assert kernel_cache.write(place, made)
    (warning, *_) = COMPILE_ALL["warnings"](kernel_cache.read(place).log)
    assert "warning" in warning and '"unused" was declared but never referenced' in warning


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100"])
def test_every_architecture_compiles_without_a_gpu(unit, arch):
    assert nvrtc.compile_unit(unit, arch).cubin[:4] == b"\x7fELF"


def test_a_refused_source_is_shown_with_the_compilers_words(unit):
    (unit.root / "f.cu").write_text('#include "scale.cuh"\n__global__ void g() { undeclared(); }')
    with pytest.raises(CompileError, match=r"(?s)cannot compile f\.cu.*for sm_90a.*\"undeclared\" is undefined"):
        nvrtc.compile_unit(unit, "sm_90a")


def test_a_missing_header_is_named(unit):
    (unit.root / "scale.cuh").unlink()
    with pytest.raises(CompileError, match=r"f\.cu needs scale\.cuh, which cannot be read"):
        jit.binary(unit, "sm_90a")


def test_headers_that_are_made_count_like_those_in_the_folder(unit):
    made = replace(unit, headers=(("extra.cuh", '#include "scale.cuh"\nconstexpr float TWICE = 2 * SCALE;'),))
    text = SOURCE.replace('"scale.cuh"', "HEADER").replace("SCALE *", "TWICE *")
    (unit.root / "f.cu").write_text(text)
    made = replace(made, defines=(("HEADER", '"extra.cuh"'),))
    assert jit.binary(made, "sm_90a").cubin
    assert nvrtc.sources(made).keys() == {"f.cu", "extra.cuh", "scale.cuh"}
    other = replace(made, headers=(("extra.cuh", '#include "scale.cuh"\nconstexpr float TWICE = SCALE;'),))
    assert kernel_cache.entry(made, "sm_90a", (13, 0)) != kernel_cache.entry(other, "sm_90a", (13, 0))


def test_what_was_compiled_is_found_in_memory_and_on_disk(unit, processes, caplog):
    first = processes.binary(unit)
    assert processes.binary(unit) is first
    processes.start()
    assert processes.binary(unit) == first
    assert processes.compiled == ["f.cu"]
    notices = [text for text in messages(caplog) if text.startswith("compiling")]
    assert len(notices) == 1 and "f.cu for sm_90a" in notices[0]


def test_whatever_the_machine_code_depends_on_makes_another_entry(unit):
    place = kernel_cache.entry(unit, "sm_90a", (13, 0))
    others = [
        kernel_cache.entry(unit, "sm_80", (13, 0)),
        kernel_cache.entry(unit, "sm_90a", (13, 1)),
        kernel_cache.entry(replace(unit, names=unit.names[:1]), "sm_90a", (13, 0)),
        kernel_cache.entry(replace(unit, defines=(("N", "1"),)), "sm_90a", (13, 0)),
        kernel_cache.entry(unit, "sm_90a", (13, 0), flags="other flags"),
    ]
    (unit.root / "scale.cuh").write_text("#pragma once\n#define SCALE 3.0f\n")
    others.append(kernel_cache.entry(unit, "sm_90a", (13, 0)))
    assert len({place, *others}) == 7


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-9] + b"x" + data[-8:]]
)
def test_a_damaged_entry_is_noticed_and_made_again(unit, processes, damage, caplog):
    first = processes.binary(unit)
    place = kernel_cache.entry(unit, "sm_90a", nvrtc.nvrtc_version())
    place.write_bytes(damage(place.read_bytes()))
    processes.start()
    assert processes.binary(unit).cubin == first.cubin
    assert len(processes.compiled) == 2
    assert sum("is damaged" in text for text in messages(caplog)) == 1
    processes.start()
    processes.binary(unit)
    assert len(processes.compiled) == 2


def test_nothing_is_left_beside_the_entry(unit, processes):
    processes.binary(unit)
    assert [path.suffix for path in kernel_cache.folder().iterdir()] == [".bin"]


@contextmanager
def a_file_in_the_way(cache: Path) -> Iterator[str]:
    """The folder cannot be made: neither the lock nor the entry can be written."""
    cache.write_text("in the way")
    yield "Not a directory"


@contextmanager
def no_room_for_a_byte(cache: Path) -> Iterator[str]:
    """The lock can be taken, and the entry cannot be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("obstacle", [a_file_in_the_way, no_room_for_a_byte])
def test_a_cache_that_cannot_be_written_costs_one_line(unit, processes, obstacle, tmp_path, caplog):
    with obstacle(tmp_path / "cache") as reason:
        assert processes.binary(unit).cubin
        processes.start()
        assert processes.binary(unit).cubin
    assert len(processes.compiled) == 2
    complaints = [text for text in messages(caplog) if "cannot be kept" in text]
    assert len(complaints) == 1
    assert reason in complaints[0] and "PREFIXKIT_CACHE" in complaints[0]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_no_obstacle(unit, processes, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert processes.binary(unit).cubin


def test_many_processes_at_once_compile_once(unit, processes):
    context = multiprocessing.get_context("fork")  # of what is imported here, which takes seconds elsewhere
    everyone, answers = context.Barrier(4), context.SimpleQueue()

    def ask():
        everyone.wait()
        made = processes.binary(unit)
        answers.put((processes.compiled, made.cubin))

    running = [context.Process(target=ask) for _ in range(4)]
    for process in running:
        process.start()
    found = [answers.get() for _ in running]
    for process in running:
        process.join()
    assert [file for compiled, _ in found for file in compiled] == ["f.cu"], "one compiles, and the others wait for it"
    assert len({cubin for _, cubin in found}) == 1


def test_a_lock_that_nobody_lets_go_of_delays_but_does_not_stop(unit, caplog):
    place = kernel_cache.entry(unit, "sm_90a", nvrtc.nvrtc_version())
    place.parent.mkdir(parents=True)
    with place.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with kernel_cache.making(place, most_seconds=0.1):
            assert kernel_cache.write(place, nvrtc.compile_unit(unit, "sm_90a"))
    assert kernel_cache.read(place) is not None
    assert any("has been locked" in text for text in messages(caplog))


SUPPORTED = (75, 80, 86, 89, 90, 100, 103, 120)


ARCHS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (10, 3): "sm_103",
    (12, 1): "sm_120",
}


@pytest.mark.parametrize(("capability", "arch"), ARCHS.items())
def test_code_is_for_the_gpu_or_the_nearest_before_it(capability, arch):
    assert arch_for(capability, SUPPORTED) == arch


@pytest.mark.parametrize(
    ("capability", "words"), [((7, 5), "8.0 or later"), ((13, 0), "does not know; install a newer")]
)
def test_other_gpus_are_refused_by_name(capability, words):
    with pytest.raises(UnsupportedArch, match=words):
        arch_for(capability, SUPPORTED)
