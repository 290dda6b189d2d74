"""The facts for a report of a problem."""

import torch

from prefixkit.commands.env import backend_and_reason, facts


def test_versions_threads_and_the_backend_are_there():
    found = dict(facts())
    assert found["torch"] == torch.__version__
    assert found["torch threads"].startswith(str(torch.get_num_threads()))
    assert found["backend"].startswith(("cpu: ", "cuda: "))


def test_without_a_gpu_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend, reason = backend_and_reason()
    assert backend == "cpu"
    assert "torch sees no CUDA device" in reason
