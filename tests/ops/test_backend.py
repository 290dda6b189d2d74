"""Which backend runs, and what is said about it; no GPU needed."""

from __future__ import annotations

import pytest
import torch

from prefixkit.cuda import nvrtc
from prefixkit.ops import backend
from prefixkit.ops.backend import BackendError, choose, probe

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU, as far as the probe looks: change its facts by calling it."""
    monkeypatch.delenv(backend.VARIABLE, raising=False)

    def facts(capability=(9, 0), nvrtc_version=(13, 0), driver=(13, 0), archs=(75, 80, 86, 89, 90, 100)):
        def version():
            if nvrtc_version is None:
                raise nvrtc.NvrtcMissing(
                    f"cuda-core with NVRTC cannot be used (No module named 'cuda'); {nvrtc.REMEDY}"
                )
            return nvrtc_version

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Test GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(nvrtc, "nvrtc_version", version)
        monkeypatch.setattr(nvrtc, "supported_archs", lambda: archs)
        monkeypatch.setattr(backend, "driver_cuda", lambda: driver)

    facts()
    return facts


def test_all_there_means_our_kernels(machine):
    found = probe(GPU)
    assert found.name == "cuda"
    assert found.reason == "Test GPU, kernels for sm_90a by NVRTC 13.0"
    assert found.remedy == ""


@pytest.mark.parametrize(
    ("facts", "reason", "remedy"),
    [
        ({"nvrtc_version": None}, "No module named 'cuda'", "pip install 'prefixkit[cuda]'"),
        ({"capability": (7, 5)}, "need compute capability 8.0 or later, this GPU has 7.5", ""),
        ({"capability": (13, 0)}, "this NVRTC does not know", "install a newer one"),
        ({"driver": (12, 8)}, "serves CUDA 12.8, and does not load what NVRTC 13.0 makes", "update the driver"),
    ],
)
def test_what_is_missing_means_torch_with_a_reason_and_a_remedy(machine, facts, reason, remedy):
    machine(**facts)
    found = probe(GPU)
    assert found.name == "torch"
    assert reason in found.reason
    assert remedy in found.remedy


def test_the_variable_overrides_the_probe(machine, monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "torch")
    assert choose(GPU).name == "torch"
    monkeypatch.setenv(backend.VARIABLE, "CUDA")
    assert choose(GPU).name == "cuda"


def test_asking_for_what_cannot_run_is_an_error_with_the_reason(machine, monkeypatch):
    machine(nvrtc_version=None)
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    with pytest.raises(BackendError, match=r"PREFIXKIT_BACKEND=cuda, but the kernels cannot run: .*pip install"):
        choose(GPU)
    monkeypatch.setenv(backend.VARIABLE, "cpu")
    with pytest.raises(BackendError, match="the tensors are on cuda:0; move the model to the CPU, or unset"):
        choose(GPU)
    monkeypatch.setenv(backend.VARIABLE, "triton")
    with pytest.raises(BackendError, match=r"must be one of cuda, torch, cpu, or unset.*got 'triton'"):
        choose(GPU)


def test_tensors_on_the_cpu_always_run_there(monkeypatch):
    for name in ("", "cuda", "torch", "cpu"):
        monkeypatch.setenv(backend.VARIABLE, name)
        assert choose(torch.device("cpu")).name == "cpu"


def test_without_a_gpu_asking_for_one_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    assert backend.best().name == "cpu"
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    with pytest.raises(BackendError, match="torch sees no CUDA device"):
        backend.best()
    assert any("torch sees no CUDA device" in value for name, value in backend.facts() if name == "backend")


def test_the_first_use_says_what_runs_in_one_line(machine, monkeypatch, caplog):
    machine(nvrtc_version=None)
    backend.ops_for.cache_clear()
    try:
        assert backend.ops_for(GPU) is backend.ops_for(GPU)
    finally:
        backend.ops_for.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention on cuda:0 runs on torch: cuda-core with NVRTC cannot be used")
    assert line.endswith("pip install 'prefixkit[cuda]'")
