"""Which backend runs, and what is said about it; no GPU needed."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

import prefixkit.backends  # noqa: F401  (registers them)
from prefixkit.backends.cuda import probe as cuda_probe
from prefixkit.backends.cuda.probe import probe
from prefixkit.cli.commands.env import facts
from prefixkit.cuda import nvrtc
from prefixkit.ops import backend
from prefixkit.ops.backend import BackendError, Choice, choose
from tests.fake_gpu import pretend

GPU = torch.device("cuda", 0)
NO_NVRTC = nvrtc.NvrtcMissing(f"cuda-core with NVRTC cannot be used (No module named 'cuda'); {nvrtc.REMEDY}")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Makes this a machine whose GPU our kernels serve, but for some facts about it."""
    monkeypatch.delenv(backend.VARIABLE, raising=False)

    def nvrtc_version(found):
        if isinstance(found, Exception):
            raise found
        return found

    def make(capability=(9, 0), hip=None, version=(13, 0), driver=(13, 0)):
        pretend(monkeypatch, capability)
        facts = (
            (torch.version, "hip", hip),
            (nvrtc, "nvrtc_version", lambda: nvrtc_version(version)),
            (nvrtc, "supported_archs", lambda: (75, 80, 86, 89, 90, 100)),
            (cuda_probe, "driver_cuda", lambda: driver),
        )
        for fact in facts:
            monkeypatch.setattr(*fact)

    make()
    return make


def test_all_there_means_our_kernels():
    assert choose(GPU) == probe(GPU) == Choice("cuda", "Test GPU, kernels for sm_90a by NVRTC 13.0", "")


@pytest.mark.parametrize(
    ("facts", "reason", "remedy"),
    [
        ({"version": NO_NVRTC}, "No module named 'cuda'", "pip install 'prefixkit[cuda]'"),
        ({"capability": (7, 5)}, "need compute capability 8.0 or later, this GPU has 7.5", ""),
        ({"capability": (13, 0)}, "this NVRTC does not know", "install a newer one"),
        ({"driver": (12, 8)}, "serves CUDA 12.8, and does not load what NVRTC 13.0 makes", "update the driver"),
        ({"hip": "6.4"}, "this torch is built for AMD's", ""),
    ],
)
def test_what_is_missing_means_torch_with_a_reason_and_a_remedy(machine, facts, reason, remedy):
    machine(**facts)
    found = probe(GPU)
    assert found.name == "torch"
    assert reason in found.reason
    assert remedy in found.remedy
    assert choose(GPU) == found


def test_the_variable_overrides_the_probe(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "torch")
    assert choose(GPU).name == "torch"
    monkeypatch.setenv(backend.VARIABLE, "CUDA")
    assert choose(GPU).name == "cuda"


def test_asking_for_what_cannot_run_is_an_error_with_the_reason(machine, monkeypatch):
    machine(version=NO_NVRTC)
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
    pretend(monkeypatch)
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    assert backend.best().name == "cpu"
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    with pytest.raises(BackendError, match="torch sees no CUDA device"):
        backend.best()
    assert any("torch sees no CUDA device" in value for name, value in facts() if name == "backend")


def test_devices_of_other_kinds_are_refused():
    with pytest.raises(BackendError, match="runs on CPUs and CUDA devices, not on meta; move the model"):
        choose(torch.device("meta"))


def test_a_device_is_refused_by_name_where_no_backend_is_registered():
    """In a process of its own, that imports the ops alone."""
    run = """
import torch
from prefixkit.ops.backend import BackendError, backend_for
for device in ("cpu", "cuda"):
    try:
        backend_for(torch.device(device, 0))
    except BackendError as error:
        print(device, error)
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert [line.split()[0] for line in said] == ["cpu", "cuda"]
    assert all("no backend" in line and "import prefixkit.backends first" in line for line in said)


def test_a_choice_reads_as_one_line(machine):
    """As the log says it at the first use of a device, and ``prefixkit env``."""
    assert str(probe(GPU)) == "cuda: Test GPU, kernels for sm_90a by NVRTC 13.0"
    machine(version=NO_NVRTC)
    line = str(probe(GPU))
    assert line.startswith("torch: cuda-core with NVRTC cannot be used")
    assert line.endswith("pip install 'prefixkit[cuda]'")
    assert "\n" not in line


def test_the_first_use_says_what_runs_in_one_line(monkeypatch, caplog):
    monkeypatch.setenv(backend.VARIABLE, "torch")
    nobodys = torch.device("cuda", 97)  # a backend is chosen once per device
    with caplog.at_level(logging.WARNING, logger="prefixkit"):
        assert backend.backend_for(nobodys) is backend.backend_for(nobodys)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention on cuda:97 runs on torch: PREFIXKIT_BACKEND=torch; unset PREFIXKIT_BACKEND for")


def test_plain_torch_is_one_backend_for_a_cpu_and_a_gpu(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "torch")
    assert backend.backend_for(torch.device("cpu")) is backend.backend_for(torch.device("cuda", 97))
