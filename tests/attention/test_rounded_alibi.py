"""Falcon's ALiBi: the same bias as its own code makes, on the CPU and in the C++ of the kernels."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from prefixkit.attention.rounded_alibi import rounded_alibi
from prefixkit.attention.variants import Variant, register
from prefixkit.backends.cuda.variant_header import header, on_device

LENGTH = 3000
FLOATS = """
#define DEVICE
inline int __float_as_int(float x) { int i; __builtin_memcpy(&i, &x, 4); return i; }
inline float __int_as_float(int i) { float x; __builtin_memcpy(&x, &i, 4); return x; }
"""
CALL = """
extern "C" void scores(int heads, int length, const float* parameters, float* out) {
    for (int head = 0; head < heads; ++head)
        for (int at = 0; at < length; ++at)
            out[head * length + at] = prefixkit::Variant::score(0.5f, length, at, head, parameters);
}
"""


def falcon(heads: int) -> tuple[torch.Tensor, Variant]:
    """``[heads, LENGTH]`` the bias of Falcon's own code, and the variant."""
    bias = build_alibi_tensor(torch.ones(1, LENGTH, dtype=torch.int64), heads, torch.float32)[:, 0]
    return bias * 0.3, rounded_alibi(bias[:, 1].tolist(), 0.3)


@pytest.mark.parametrize("heads", [3, 8, 71])
def test_scores_get_the_bias_that_falcons_code_makes(heads: int) -> None:
    bias, variant = falcon(heads)
    assert variant.score_mod is not None
    numbers = torch.arange(heads)[:, None, None]
    score = torch.zeros(heads, 1, LENGTH)
    got = variant.score_mod(score, torch.tensor([[LENGTH]]), torch.arange(LENGTH)[None], numbers)
    torch.testing.assert_close(got[:, 0], bias, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [3, 8, 71])
def test_the_kernels_text_rounds_alike(heads: int, tmp_path: Path) -> None:
    bias, variant = falcon(heads)
    text = header(variant)
    assert text is not None
    source, library = tmp_path / "scores.cpp", tmp_path / "scores.so"
    source.write_text(FLOATS + text.replace("#pragma once", "") + CALL)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    parameters = on_device(register(variant), heads, torch.device("cpu")).numpy()
    got = np.empty((heads, LENGTH), np.float32)
    pointers = (array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for array in (parameters, got))
    ctypes.CDLL(str(library)).scores(heads, LENGTH, *pointers)
    np.testing.assert_allclose(got, bias.numpy() + 0.5, rtol=1e-6)


def test_equal_numbers_are_one_variant() -> None:
    assert register(rounded_alibi([0.5, 0.25], 0.3)) == register(rounded_alibi([0.5, 0.25], 0.3))
    assert len({register(rounded_alibi(*of)) for of in [([0.5], 0.3), ([0.25], 0.3), ([0.5], 0.6)]}) == 3


@pytest.mark.parametrize(("slopes", "factor"), [([], 1.0), ([float("inf")], 1.0), ([0.5], 0.0), ([0.5], float("nan"))])
def test_impossible_numbers_are_refused(slopes: list[float], factor: float) -> None:
    with pytest.raises(ValueError, match="rounded_alibi: slopes"):
        rounded_alibi(slopes, factor)
