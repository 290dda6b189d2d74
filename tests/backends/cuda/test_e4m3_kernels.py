"""Keys and values rounded to e4m3 by the kernels' own source, run on the CPU with their launches: the bits of torch."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda import kv
from prefixkit.backends.cuda.kernels import APPEND, FLOATS, ROTARY, rotary_name
from prefixkit.backends.torch.plain_kv import as_stored
from prefixkit.ops import library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.ops.arguments import FP8
from tests.attention.rotations import DTYPES, bits, fresh_rng, random_rows, random_slots
from tests.emulation.build import build
from tests.fake_gpu import pretend, pretend_to_launch

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("rotary"), "rotary", {}, ROTARY.headers + APPEND.headers)


@pytest.fixture
def launched(emulated: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that has the kernels which write e4m3 and nothing else; the names of those that have run."""
    names: list[str] = []

    def load(unit: Any, device: int) -> dict[str, Any]:
        kernels = {rotary_name(dtype, True): f"rotary_{dtype}_e4m3" for dtype in FLOATS}
        if unit is APPEND:
            of = {text: dtype for dtype, text in FLOATS.items()}
            found = [re.fullmatch(r"prefixkit::kv_append_e4m3<(.+), (\d)>", name) for name in unit.names]
            kernels = {match[0]: f"append_{of[match[1]]}_{match[2]}" for match in found if match}
        size = emulated.append_bytes() if unit is APPEND else emulated.rotary_bytes()
        return {name: SimpleNamespace(name=to, parameter_bytes=size) for name, to in kernels.items()}

    def launch(function: Any, layout: Any, values: Any, grid: Any, block: int, *_: Any, **__: Any) -> None:
        names.append(function.name)
        struct = ctypes.create_string_buffer(layout.packer.pack(*values), function.parameter_bytes)
        getattr(emulated, function.name)(struct, grid[0], block)

    pretend(monkeypatch, (9, 0))
    pretend_to_launch(monkeypatch, kv, load, launch)
    return names


def same_bytes(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_every_number_of_16_bits_and_many_of_32_round_as_torch_rounds_them(emulated: ctypes.CDLL) -> None:
    rng = fresh_rng()
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    random = torch.from_numpy(rng.integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32))
    # Ties between numbers of e4m3, those next to them, and all that lies near its ends.
    held = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    ties = (held[:-1] + held[1:]) / 2
    near = torch.cat([held, ties, torch.tensor([448.0, 464.0, 480.0, 2**-10, 2**-6])])
    near = torch.cat([near, *(near.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))])
    for numbers in (every.view(torch.bfloat16), every.view(torch.float16), random, near, -near):
        wide = numbers.float().contiguous()
        found = torch.empty(wide.shape, dtype=torch.uint8)
        emulated.round_to_e4m3(ctypes.c_void_p(wide.data_ptr()), ctypes.c_void_p(found.data_ptr()), len(wide))
        expected, nan = as_stored(numbers).view(torch.uint8), numbers.isnan()
        assert torch.equal(found[~nan], expected[~nan])
        assert bool((found[nan] & 0x7F == 0x7F).all())  # of which sign a NaN is torch does not say


def pages_of(shape: tuple[int, ...], head_major: bool) -> Tensor:
    if not head_major:
        return torch.full(shape, torch.nan).to(FP8)
    pages, slots, heads, dim = shape
    return torch.full((pages, heads, slots, dim), torch.nan).to(FP8).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_rotated_keys_and_values_go_to_pages_in_e4m3(
    dtype: torch.dtype, head_dim: int, launched: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    rng, append = fresh_rng(), kv.Append()
    for head_major in (True, False):
        rows = random_rows(rng, dtype, 21, 6, 3, head_dim)
        rows[2].mul_(300)
        slots = random_slots(rng, 21, 80)
        slots[4], slots[11] = -1, -1
        found, expected = ([pages_of((5, 16, 3, head_dim), head_major) for _ in "kv"] for _ in range(2))
        with caplog.at_level(logging.INFO, "prefixkit"):
            rotated = append.rotary_append(*rows, *found, slots)
        assert torch.equal(bits(rotated), bits(torch.ops.prefixkit.rotary_append(*rows, *expected, slots)))
        assert all(map(same_bytes, found, expected))
    assert launched == [f"rotary_{str(dtype).removeprefix('torch.')}_e4m3"] * 2 and not caplog.records


# What becomes of rows or of pages, and whether 16 bytes can be moved at once.
FORMS = {
    "whole vectors": (64, 0, True),
    "a head of no whole vectors": (20, 0, False),
    "one element further": (64, 1, False),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_to_pages_in_e4m3(dtype: torch.dtype, form: str, launched: list[str]) -> None:
    rng, append = fresh_rng(), kv.Append()
    head_dim, further, whole = FORMS[form]
    space = (torch.randn(2, 21 * 3 * head_dim + further, generator=torch.Generator().manual_seed(3)) * 200).to(dtype)
    key, value = (x[further:].view(21, 3, head_dim) for x in space)
    slots = random_slots(rng, 21, 80)
    slots[2] = -1
    found, expected = ([pages_of((5, 16, 3, head_dim), True) for _ in "kv"] for _ in range(2))
    append.kv_append(key, value, *found, slots)
    torch.ops.prefixkit.kv_append(key, value, *expected, slots)
    assert all(map(same_bytes, found, expected))
    each = 16 // dtype.itemsize if whole else 1
    assert launched == [f"append_{str(dtype).removeprefix('torch.')}_{each}"]
