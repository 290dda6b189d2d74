"""The kernel of ``digest``: its own source on the CPU, block by block, with its launches."""

from __future__ import annotations

import ctypes
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda import digests, layouts
from prefixkit.backends.cuda.kernels import DIGEST
from tests.emulation.build import build
from tests.fake_gpu import pretend_to_launch

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("digest"), "digest", {}, DIGEST.headers)


@pytest.fixture
def launches(library, monkeypatch):
    made = []

    def load(unit, device):
        return {name: SimpleNamespace(name=name, parameter_bytes=layouts.DIGEST.size) for name in unit.names}

    def launch(function, layout, values, grid, block, shared, say):
        assert block == 256 and shared == 0
        packed = ctypes.create_string_buffer(layout.packer.pack(*values), layout.size)
        size = library.digest_on_cpu(packed, 1 if "char" in function.name else 8, grid[0])
        assert size == layout.size
        made.append(grid[0])

    pretend_to_launch(monkeypatch, digests, load, launch)
    return made


def expected(words: torch.Tensor, start: int) -> int:
    """As the kernel's header says."""
    mask, total = 2**64 - 1, 0
    for at, word in enumerate(words.tolist(), start):
        mixed = at * 0x9E3779B97F4A7C15 & mask
        total += word * ((mixed ^ mixed >> 29) | 1)
    return total & mask


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(("count", "start"), [(1, 0), (300, 7), (5000, 2**40), (0, 3)])
def test_words_are_multiplied_by_odd_numbers_and_added(dtype, count, start, launches):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    low = -(2**63) if dtype == torch.int64 else 0
    rng = np.random.default_rng(seed)
    words = torch.from_numpy(rng.integers(low, -1 - low if low else 256, count)).to(dtype)
    total = torch.tensor([5])
    digests.digest(words, start, total)
    assert (int(total) - 5) % 2**64 == expected(words, start)
    assert launches == ([-(-count // 2048)] if count else [])


def test_blocks_take_turns(launches, monkeypatch):
    monkeypatch.setattr(digests, "BLOCKS", 2)
    words, total = torch.arange(10000), torch.zeros(1, dtype=torch.int64)
    digests.digest(words, 0, total)
    assert int(total) % 2**64 == expected(words, 0) and launches == [2]
