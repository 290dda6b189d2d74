"""Which kernel serves whom, and that every instantiation compiles within its budget, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixkit.attention.variants import CAUSAL, soft_cap
from prefixkit.backends.cuda.kernels import ATTENTION, attention_unit, compiled_ahead, kernel_for
from prefixkit.cuda import nvrtc
from prefixkit.cuda.nvrtc import NvrtcMissing

ROOT = Path(__file__).parents[3]
PORTABLE, HOPPER = "attention/sm80/tree_attention.cu", "attention/sm90/tree_attention.cu"


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 240, 256])
def test_every_gpu_and_every_multiple_of_16_up_to_256_is_served(arch, head_dim):
    kernel = kernel_for(arch, head_dim, 1)
    assert kernel is not None
    assert kernel.file == (HOPPER if arch == "sm_90a" and head_dim in (64, 128) else PORTABLE)


@pytest.mark.parametrize("head_dim", [8, 72, 100, 272])
def test_other_head_sizes_have_no_kernel(head_dim):
    assert kernel_for("sm_90a", head_dim, 1) is None


def test_groups_larger_than_a_hopper_tile_take_the_portable_kernel():
    assert [kernel_for("sm_90a", 128, group).file for group in (71, 128, 129)] == [HOPPER, HOPPER, PORTABLE]


def test_the_portable_kernel_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("PREFIXKIT_KERNEL", "portable")
    assert kernel_for("sm_90a", 128, 4).file == PORTABLE


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("head_dim", [48, 96, 256])
def test_the_blocks_of_a_multiprocessor_fit_in_its_shared_memory(arch, head_dim):
    """Of which the smallest GPUs have 100 KB, A100 164, H100 228; each block takes 1 KB more than it asks for."""
    kernel = kernel_for(arch, head_dim, 1)
    room = {"sm_80": 164, "sm_90a": 228}.get(arch, 100) * 1024
    assert kernel.blocks_per_sm * (kernel.shared + 1024) <= room
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


@pytest.mark.slow
def test_every_instantiation_compiles_within_its_budget(tmp_path):
    try:
        nvrtc.nvrtc_version()
    except NvrtcMissing as missing:
        pytest.skip(str(missing))
    command = [sys.executable, str(ROOT / "scripts" / "compile_all.py"), "--out", str(tmp_path / "kernels.json")]
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
