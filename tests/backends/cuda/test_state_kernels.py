"""Kernels of steps of states: their own source on the CPU, block by block, with their launches, against float64."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.states import state_steps
from prefixkit.backends.cuda.states.state_units import (
    CONV_STEP,
    KEY_SIZES,
    RMS_NORM,
    STATE_SIZES,
    delta_unit,
    mamba2_unit,
)
from tests.emulation.build import build
from tests.fake_gpu import pretend, pretend_to_launch
from tests.ops.state_steps import (
    conv_arguments,
    conv_oracle,
    delta_arguments,
    delta_oracle,
    mamba2_arguments,
    mamba2_oracle,
    norm_oracle,
)

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TYPES = {"float": 0, "prefixkit::BFloat": 1, "prefixkit::Half": 2}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """By the number of threads of a block."""
    headers = *CONV_STEP.headers, *mamba2_unit(16).headers, *delta_unit(32).headers, *RMS_NORM.headers
    folders = {threads: tmp_path_factory.mktemp("states") for threads in (128, 256)}
    return {
        threads: build(folder, "states", {}, headers, f"-DEMULATED_THREADS={threads}")
        for threads, folder in folders.items()
    }


class Gpu:
    """A GPU that has nothing but these kernels; remembers which were launched."""

    def __init__(self, libraries):
        self.libraries, self.launched = libraries, []

    def load(self, unit, device):
        of = {CONV_STEP: layouts.CONV_STEP, RMS_NORM: layouts.RMS_NORM}
        of |= dict.fromkeys(map(mamba2_unit, STATE_SIZES), layouts.MAMBA2_STEP)
        of |= dict.fromkeys(map(delta_unit, KEY_SIZES), layouts.DELTA_RULE)
        layout = of[unit]
        return {name: SimpleNamespace(name=name, parameter_bytes=layout.size) for name in unit.names}

    def launch(self, function, layout, values, grid, block, shared, describe):
        kernel, element, size = re.fullmatch(
            r"prefixkit::(\w+)_(?:step|rule|norm)<(.+), (\d+)>", function.name
        ).groups()
        assert block == (128 if kernel == "delta" else 256) and shared == 0 and grid[1:] == (1, 1)
        packed = ctypes.create_string_buffer(layout.packer.pack(*values), layout.size)
        run = getattr(self.libraries[block], f"{kernel}_on_cpu")
        assert run(packed, TYPES[element], int(size), grid[0]) == layout.size
        self.launched.append(function.name)


@pytest.fixture
def gpu(libraries, monkeypatch):
    gpu = Gpu(libraries)
    pretend(monkeypatch, (9, 0))
    pretend_to_launch(monkeypatch, state_steps, gpu.load, gpu.launch)
    return gpu


@pytest.fixture
def generator():
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def magnitudes(given):
    """The same arguments but for signs of what is multiplied and added, so that nothing cancels out; no gate."""
    if len(given) == 6:
        return [None if of is None else of if of.dtype == torch.int64 else of.abs() for of in given]
    x, dt, rate, inward, outward, skip, bias, _, states, *slots = given
    positive = [None if of is None else of.abs() for of in (inward, outward, skip)]
    return [x.abs(), dt, rate, *positive, bias, None, states.abs(), *slots]


def judged(step, oracle, given, *more):
    """Call a step, whose float32 sums are rounded once; rows that are none return zeros, and leave slot 0 as it was."""
    exact, largest = oracle(given, *more), oracle(magnitudes(given), *(False for _ in more))
    gate, real = given[7] if len(given) > 7 else None, given[-1] != 0
    size = largest.out if gate is None else largest.out * gate.double().abs().clamp(min=0.3)
    out = step(*given, *more)
    bound = torch.finfo(out.dtype).eps / 2 * exact.out.abs() + 2e-6 * size + 1e-7  # 1e-7: of the least numbers
    assert ((out.double() - exact.out).abs() <= bound)[real].all()
    assert not out[~real].any()
    states = next(of for of in given if of is not None and len(of) == 9)
    assert ((states.double() - exact.states).abs() <= 2e-6 * largest.states).all()


@pytest.mark.drawn(2)
@DTYPES
@pytest.mark.parametrize(
    ("width", "channels", "bias", "silu"), [(4, 300, True, True), (3, 256, False, True), (2, 5, True, False)]
)
def test_a_convolution_takes_a_token(dtype, width, channels, bias, silu, gpu, generator):
    given = conv_arguments(generator, dtype, channels=channels, width=width, bias=bias)
    judged(state_steps.conv_step, conv_oracle, given, silu)
    assert gpu.launched[0].endswith(f", {width}>")


@DTYPES
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (16, {"dim": 10, "gate": True}),  # fewer rows of the state than lanes for them
        (32, {"dim": 100, "groups": 4}),
        (64, {"dim": 1, "skip": False, "bias": False}),
        (128, {"dim": 64, "heads": 2, "groups": 1, "weights": torch.float32}),
        (128, {"dim": 70, "heads": 2}),  # more than are on their way at once
        (256, {"dim": 33, "heads": 2, "weights": torch.bfloat16}),
    ],
)
def test_a_recurrence_takes_a_token(dtype, size, changes, gpu, generator):
    given = mamba2_arguments(generator, dtype, size=size, rows=5, **changes)
    judged(state_steps.mamba2_step, mamba2_oracle, given)
    assert gpu.launched[0].endswith(f", {size}>")


@DTYPES
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (32, {"size": 10, "dim": 6, "tokens": 1}),  # fewer numbers than lanes for them
        (32, {"size": 32, "dim": 34, "tokens": 5, "key_heads": 4}),  # two blocks a head, one of a single pair
        (64, {"size": 48, "dim": 32, "rows": 3, "tokens": 17}),  # more than are staged at once
        (128, {"size": 128, "dim": 64, "rows": 3, "heads": 2, "key_heads": 1, "tokens": 2}),
        (256, {"size": 192, "dim": 8, "rows": 3, "heads": 2, "normalize": False}),
    ],
)
def test_a_delta_rule_takes_tokens(dtype, size, changes, gpu, generator):
    given = delta_arguments(generator, dtype, **changes)
    exact, target = delta_oracle(given), given[-1]
    out, states = state_steps.delta_rule(*given), given[6].double()
    assert gpu.launched[0].endswith(f", {size}>")
    real, tiny = target != 0, 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert torch.allclose(out.double()[real], exact.out[real], rtol=tiny, atol=1e-5) and not out[~real].any()
    assert torch.allclose(states, exact.states, rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize(("dim", "gated", "offset"), [(20, True, 0.0), (512, False, 1.0), (700, True, 1.0)])
def test_a_norm_takes_rows_that_are_parts_of_longer_ones(dtype, dim, gated, offset, gpu, generator):
    x, gate = (torch.randn(3, 5, dim + 3, generator=generator).to(dtype)[..., 1 : dim + 1] for _ in range(2))
    weight, gate = torch.randn(dim, generator=generator).to(dtype), gate if gated else None
    exact = norm_oracle(x, weight, gate, 1e-5, offset)
    out = state_steps.rms_norm(x, weight, gate, 1e-5, offset)
    assert out.shape == x.shape and out.is_contiguous() and gpu.launched[0].endswith(f", {32 if dim <= 512 else 256}>")
    tiny = max(1e-5, torch.finfo(dtype).eps / 1.9)
    assert ((out.double() - exact).abs() <= tiny * exact.abs() + 1e-6).all()


def test_rows_whose_slots_do_not_exist_are_none(gpu, generator):
    for given, step, more in (
        (conv_arguments(generator, torch.float32, 3), state_steps.conv_step, (True,)),
        (mamba2_arguments(generator, torch.float32, 3), state_steps.mamba2_step, ()),
        (delta_arguments(generator, torch.float32, 3), state_steps.delta_rule, ()),
    ):
        given[-2:] = torch.tensor([-1, 9, 2**40]), torch.tensor([1, 2, 2**40])
        states = next(of for of in given if isinstance(of, torch.Tensor) and len(of) == 9)
        before = states.clone()
        assert not step(*given, *more).any() and torch.equal(states, before)


def test_rows_that_are_not_contiguous_are_copied(gpu, generator):
    given = mamba2_arguments(generator, torch.float32)
    for at in (0, 1, 3, 4):
        given[at] = given[at].mT.contiguous().mT
    judged(state_steps.mamba2_step, mamba2_oracle, given)


def test_sizes_that_no_kernel_is_for_run_in_plain_torch_after_a_line_in_the_log(gpu, generator, caplog):
    caplog.set_level(logging.INFO, "prefixkit")
    for given, step, oracle, more in (
        (conv_arguments(generator, torch.float32, width=5), state_steps.conv_step, conv_oracle, (True,)),
        (mamba2_arguments(generator, torch.float32, size=24), state_steps.mamba2_step, mamba2_oracle, ()),
        (mamba2_arguments(generator, torch.float32, dim=257), state_steps.mamba2_step, mamba2_oracle, ()),
        (delta_arguments(generator, torch.float32, dim=5), state_steps.delta_rule, delta_oracle, ()),
    ):
        wanted, real = oracle(given, *more), given[-1] != 0
        assert torch.allclose(step(*given, *more).double()[real], wanted.out[real], rtol=1e-4, atol=1e-4)
        step(*given, *more)
    assert not gpu.launched
    said = [record.message for record in caplog.records if "plain torch" in record.message]
    assert len(said) == len(set(said)) == 4 and "width of 5" in said[0] and "10 x 24" in said[1]
