"""The facts for a report of a problem."""

import io
import re
from importlib.metadata import version

import pytest
import torch
from rich.console import Console

from prefixkit.cli.commands.env import bfloat16_advice, facts, run_env
from tests.fake_gpu import pretend


def test_versions_threads_and_the_backend_are_there():
    found = dict(facts())
    assert found["torch"] == version("torch")
    assert found["torch threads"].startswith(str(torch.get_num_threads()))
    assert found["backend"].startswith(("cpu: ", "cuda: ", "torch: "))
    assert "NVRTC" in found


def test_what_the_cpu_does_in_bfloat16_is_measured():
    assert re.search(r": products at \d+\.\d times float32, use (bfloat16|float32)$", dict(facts())["CPU bfloat16"])


@pytest.mark.parametrize(
    "cpuinfo, speed, advice",
    [
        (
            "flags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile\n",
            6.04,
            "AMX-BF16: products at 6.0 times float32, use bfloat16",
        ),
        ("flags\t\t: fpu avx512_bf16\n", 1.9, "AVX512-BF16: products at 1.9 times float32, use bfloat16"),
        ("flags\t\t: fpu avx2\n", 0.41, "no instructions for it known: products at 0.4 times float32, use float32"),
        ("Features\t: fp asimd bf16\n", 2.0, "Arm BF16: products at 2.0 times float32, use bfloat16"),
        ("", 1.0, "no instructions for it known: products at 1.0 times float32, use float32"),
    ],
)
def test_advice_on_bfloat16_goes_by_what_was_measured(cpuinfo, speed, advice):
    assert bfloat16_advice(cpuinfo, speed) == advice


def test_without_a_gpu_the_backend_is_the_cpu_and_the_reason_is_said(monkeypatch):
    pretend(monkeypatch)
    monkeypatch.delenv("PREFIXKIT_BACKEND", raising=False)
    assert dict(facts())["backend"].startswith("cpu: torch sees no CUDA device")


def test_a_remedy_with_brackets_is_shown_whole(monkeypatch):
    monkeypatch.setenv("PREFIXKIT_CACHE", "/cache[cuda]/:smile:")
    console = Console(file=io.StringIO(), width=200)
    run_env(console)
    assert "/cache[cuda]/:smile:" in console.file.getvalue()


def test_a_choice_that_cannot_be_is_shown_and_not_raised(monkeypatch):
    monkeypatch.setenv("PREFIXKIT_BACKEND", "abacus")
    assert dict(facts())["backend"].startswith("none: PREFIXKIT_BACKEND must be one of")
