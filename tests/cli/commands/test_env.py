"""The facts for a report of a problem."""

import io

import torch
from rich.console import Console

from prefixkit.cli.commands.env import facts, run_env
from tests.fake_gpu import pretend


def test_versions_threads_and_the_backend_are_there():
    found = dict(facts())
    assert found["torch"] == torch.__version__
    assert found["torch threads"].startswith(str(torch.get_num_threads()))
    assert found["backend"].startswith(("cpu: ", "cuda: ", "torch: "))
    assert "NVRTC" in found


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
