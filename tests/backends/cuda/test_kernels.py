"""Which kernel serves whom, and that every instantiation compiles within its budget, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prefixkit.attention.variants import CAUSAL, soft_cap
from prefixkit.backends.cuda import kernels
from prefixkit.backends.cuda.kernels import (
    ATTENTION,
    FLOATS,
    SAMPLE,
    attention_unit,
    compiled_ahead,
    expanded_kernel_for,
    kernel_for,
    sample_name,
)
from prefixkit.cuda import jit, nvrtc
from prefixkit.cuda.nvrtc import NvrtcMissing, Unit
from scripts.compile_all import ARCHS, BUDGET, compile_one, complaints, main
from tests.covering import cover

PORTABLE, HOPPER = "attention/sm80/tree_attention.cu", "attention/sm90/tree_attention.cu"
PLANNER = "planner/plan_tree.cu"


def nvrtc_is_there() -> bool:
    try:
        return bool(nvrtc.nvrtc_version())
    except NvrtcMissing:
        return False


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 240, 256])
def test_every_gpu_and_every_multiple_of_16_up_to_256_is_served(arch, head_dim):
    kernel = kernel_for(arch, head_dim, 1)
    assert kernel is not None
    assert kernel.file == (HOPPER if arch == "sm_90a" and head_dim in (64, 80, 96, 128, 256) else PORTABLE)


@pytest.mark.parametrize("head_dim", [8, 72, 100, 272])
def test_other_head_sizes_have_no_kernel(head_dim):
    assert kernel_for("sm_90a", head_dim, 1) is None


def test_groups_larger_than_a_hopper_tile_take_the_portable_kernel():
    assert [kernel_for("sm_90a", 128, group).file for group in (71, 128, 129)] == [HOPPER, HOPPER, PORTABLE]
    assert [kernel_for("sm_90a", 256, group).file for group in (16, 64, 65)] == [HOPPER, HOPPER, PORTABLE]


def test_one_warpgroup_of_hoppers_kernel_holds_tiles_of_large_heads():
    kernels = [kernel_for("sm_90a", *heads) for heads in ((128, 1), (256, 1), (192, 1, 128))]
    assert [(k.tile_rows, k.threads, k.kv_tile(256)) for k in kernels] == [
        (128, 512, 64),
        (64, 384, 32),
        (128, 512, 64),
    ]
    assert expanded_kernel_for("sm_90a", 192, 64, 256) is None


def test_two_warps_take_groups_of_9_to_16_together_on_hopper():
    rows = [kernel_for("sm_90a", 128, group).decode_rows for group in (1, 8, 9, 16, 17)]
    assert rows == [8, 8, 16, 16, 8]
    assert kernel_for("sm_90a", 192, 16, 128).decode_rows == kernel_for("sm_80", 128, 16).decode_rows == 8
    assert dict(attention_unit(kernel_for("sm_90a", 128, 16), 128, True, CAUSAL).defines)["PREFIXKIT_ROW_PARTS"] == "2"


def test_pages_in_e4m3_have_kernels_where_k_and_v_have_one_head_size():
    assert all(kernel_for(arch, dim, 4, e4m3=True).e4m3 for arch in ("sm_80", "sm_90a") for dim in (64, 128, 256))
    assert kernel_for("sm_90a", 256, 4, e4m3=True).file == PORTABLE
    assert kernel_for("sm_90a", 192, 4, 128, e4m3=True) is None
    tiles = [kernel_for("sm_90a", dim, 4, e4m3=e4m3).decode_kv_tile for dim in (64, 128) for e4m3 in (False, True)]
    assert tiles == [32, 64, 16, 32]
    unit = attention_unit(kernel_for("sm_90a", 128, 4, e4m3=True), 128, False, CAUSAL)
    assert dict(unit.defines)["PREFIXKIT_KV_FP8"] == "1"


@pytest.fixture
def asked_for_portable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that begins with the variable."""
    monkeypatch.setenv("PREFIXKIT_KERNEL", "portable")
    kernels.first_named.clear()
    yield
    kernels.first_named.clear()


def test_the_portable_kernel_can_be_asked_for(asked_for_portable):
    assert kernel_for("sm_90a", 128, 4).file == PORTABLE


def test_another_kernel_than_plans_were_made_for_is_an_error(asked_for_portable, monkeypatch):
    kernel_for("sm_90a", 128, 16)
    monkeypatch.delenv("PREFIXKIT_KERNEL")
    for choose in (lambda: kernel_for("sm_90a", 128, 16), lambda: kernels.latent_kernel_for("sm_90a", 512, 64)):
        with pytest.raises(ValueError, match=r"PREFIXKIT_KERNEL is '', and was 'portable'.*set it before"):
            choose()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("head_dim", [48, 96, 256])
def test_the_blocks_of_a_multiprocessor_fit_in_its_shared_memory(arch, head_dim, asked_for_portable):
    """Of which the smallest GPUs have 100 KB, A100 164, H100 228; each block takes 1 KB more than it asks for."""
    kernel = kernel_for(arch, head_dim, 1)
    space = {"sm_80": 164, "sm_90a": 228}.get(arch, 100) * 1024
    assert kernel.blocks_per_sm * (kernel.shared + 1024) <= space
    assert kernel.tile_rows == (64 if head_dim > 128 else 128)


def test_sources_differ_by_all_that_the_source_asks_of_the_preprocessor():
    kernel = kernel_for("sm_80", 96, 1)
    unit = attention_unit(kernel, 96, True, CAUSAL)
    assert dict(unit.defines) == {
        "PREFIXKIT_HEAD_DIM": "96",
        "PREFIXKIT_HALF": "1",
        "PREFIXKIT_BLOCKS": "2",
        "PREFIXKIT_SHARED": str(81 * 1024),
    }
    capped = attention_unit(kernel, 96, True, soft_cap(3.0))
    assert capped.headers and capped.names == (ATTENTION,)
    assert len(set(compiled_ahead("sm_90a"))) == len(compiled_ahead("sm_90a"))


def instantiations() -> Iterator[tuple[Unit, str]]:
    """Every kernel for some target, and some for every target; of a source's cases (head sizes, dtypes, ways to keep
    rows) each for some target.

    ``scripts/compile_all.py`` compiles all of them, and ``scripts/gpu_check.sh`` runs it.
    """
    portable: dict[tuple[str, str, tuple[str, bool, bool]], Unit] = {}
    hopper: dict[tuple[str, str, tuple[tuple[str, str], ...]], Unit] = {}
    planners: dict[tuple[str, ...], tuple[str, Unit]] = {}
    sampling: dict[tuple[str, bool], str] = {}
    others = list[tuple[str, Unit]]()
    for arch in ARCHS:
        for unit in compiled_ahead(arch):
            defines = dict(unit.defines)
            if unit is SAMPLE:
                sampling |= {(dtype, cached): arch for dtype in FLOATS for cached in (True, False)}
            elif unit.file == PORTABLE:
                kind = defines["PREFIXKIT_HALF"], "PREFIXKIT_VARIANT" in defines, "PREFIXKIT_KV_FP8" in defines
                portable[arch, defines["PREFIXKIT_HEAD_DIM"], kind] = unit
            elif unit.file == HOPPER:
                of = defines.pop("PREFIXKIT_HEAD_DIM"), defines.pop("PREFIXKIT_HALF")
                hopper[*of, tuple(defines.items())] = unit
            elif unit.file == PLANNER:
                planners.setdefault(tuple(defines.values()), (arch, unit))
            else:
                others.append((arch, unit))
    for of in cover(hopper, 1):
        yield hopper[of], "sm_90a"
    for arch, unit in [*(planners[of] for of in cover(planners, 1)), *cover(others, 1)]:
        yield unit, arch
    # Variants in heads of 128 spill the most; each of the four takes as long as all others of its target.
    # Pages in e4m3 exist for two head sizes, of which one then needs no other kernel.
    e4m3 = [(arch, "64", (half, False, True)) for arch, half in (("sm_89", "0"), ("sm_100", "1"))]
    for case in cover(portable, 1, always=[("sm_80", "128", ("0", True, False)), *e4m3]):
        yield portable[case], case[0]
    for dtype, cached in cover(sampling, 1):
        yield replace(SAMPLE, names=(sample_name(dtype, cached),)), sampling[dtype, cached]


@pytest.mark.drawn(2)
@pytest.mark.skipif(not nvrtc_is_there(), reason="needs NVRTC")
@pytest.mark.parametrize(
    ("unit", "arch"), [pytest.param(*case, id=f"{case[1]} {case[0]}") for case in instantiations()]
)
def test_an_instantiation_compiles_within_its_budget(unit: Unit, arch: str) -> None:
    """Compiled once on this machine, while its source and the compiler stay as they are."""
    record = compile_one((unit, arch), jit.binary)
    assert not list(complaints([record], json.loads(BUDGET.read_text())))


@pytest.mark.skipif(not nvrtc_is_there(), reason="needs NVRTC")
def test_the_script_that_compiles_all_writes_what_kernels_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels.json"
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")  # which the script sets, and this process shall forget
    assert main(["--only", "kv/advance", "--out", str(out)]) == 0, capsys.readouterr().err
    records = json.loads(out.read_text())["units"]
    assert [record["arch"] for record in records] == list(ARCHS)
    assert all(list(record["kernels"]) == ["prefixkit::advance"] for record in records)
