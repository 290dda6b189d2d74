"""Compiling ahead."""

from __future__ import annotations

import pytest

from prefixkit.backends.cuda.kernels import ADVANCE, APPEND
from prefixkit.backends.cuda.warmup import NoTarget, targets, warm_up
from prefixkit.cuda import jit, nvrtc
from prefixkit.cuda.nvrtc import NvrtcMissing
from tests.fake_gpu import pretend

try:
    nvrtc.nvrtc_version()
except NvrtcMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


def test_a_second_warm_up_finds_all_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path))
    jit.binary.cache_clear()
    first, second = (list(warm_up(["sm_80"], lambda arch: [APPEND, ADVANCE])) for _ in range(2))
    assert [done.unit for done in first] == [APPEND, ADVANCE]
    assert all(done.seconds is not None and done.seconds > 0 for done in first)
    assert all(done.seconds is None for done in second)


@pytest.mark.parametrize(("arch", "target"), [("sm_90", "sm_90a"), ("sm_90a", "sm_90a"), ("sm_80", "sm_80")])
def test_a_target_can_be_named(arch, target):
    assert targets(arch) == [target]


@pytest.mark.parametrize("arch", ["sm_10", "hopper", "90", ""])
def test_an_unknown_target_is_refused_with_the_known_ones(arch):
    with pytest.raises(NoTarget, match=r"no target .*; it knows sm_80, .*sm_90a"):
        targets(arch)


def test_without_a_gpu_a_target_must_be_named(monkeypatch):
    pretend(monkeypatch)
    with pytest.raises(NoTarget, match="name a target, such as sm_90a"):
        targets(None)


def test_with_gpus_their_targets_are_each_taken_once(monkeypatch):
    pretend(monkeypatch, (9, 0), (8, 0), (9, 0))
    assert targets(None) == ["sm_80", "sm_90a"]
