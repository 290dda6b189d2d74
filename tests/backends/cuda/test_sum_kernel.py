"""The kernel of ``sum_parts``: its own source on the CPU, with its launches, as two processes whose threads linger."""

from __future__ import annotations

import ctypes
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda import layouts, sum_of_parts
from prefixkit.backends.cuda.kernels import SUM_PARTS
from prefixkit.ops.part_sums import BLOCKS, SHARED_BYTES, addresses_of
from tests.emulation.build import build
from tests.fake_gpu import pretend, pretend_to_launch

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

TYPES = {"float": 0, "prefixkit::BFloat": 1, "prefixkit::Half": 2}


class TwoProcesses:
    """Two GPUs that have nothing but this kernel; a launch waits for that of the other one."""

    def __init__(self, library, seed):
        self.library, self.seed, self.waiting = library, seed, []
        self.memory = [torch.zeros(SHARED_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.epochs = [torch.zeros(BLOCKS, dtype=torch.int32) for _ in range(2)]
        pairs = zip(self.memory, reversed(self.memory), self.epochs, strict=True)
        self.addresses = [addresses_of(own, theirs, epochs) for own, theirs, epochs in pairs]

    def load(self, unit, device):
        assert unit == SUM_PARTS
        return {name: SimpleNamespace(name=name, parameter_bytes=layouts.SUM_PARTS.size) for name in unit.names}

    def launch(self, function, layout, values, grid, block, shared, describe):
        assert block == 512 and shared == 0 and grid[0] <= BLOCKS and grid[1:] == (1, 1)
        packed = ctypes.create_string_buffer(layout.packer.pack(*values), layout.size)
        self.waiting.append((packed, TYPES[re.fullmatch(r"prefixkit::sum_parts<(.+)>", function.name)[1]], grid[0]))
        if len(self.waiting) == 2:
            (one, *form), (other, *same) = self.waiting
            assert form == same
            self.waiting.clear()
            assert self.library.sum_parts_on_cpu(one, other, *form, self.seed) == layout.size

    def sums(self, parts, residuals=(None, None)):
        both = zip(parts, self.addresses, residuals, strict=True)
        return [sum_of_parts.sum_parts(part, own, residual) for part, own, residual in both]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("parallel"), "parallel", {}, SUM_PARTS.headers)


@pytest.fixture
def two(library, monkeypatch):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    torch.manual_seed(seed)
    two = TwoProcesses(library, seed % 2**31)
    pretend(monkeypatch, (9, 0), (9, 0))
    pretend_to_launch(monkeypatch, sum_of_parts, two.load, two.launch)
    return two


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_get_the_sum_and_each_its_residual_rounded_like_torch(dtype, two):
    """One vector, part of a chunk, parts of several chunks; and blocks of other numbers in turns."""
    for vectors in (1, 700, 2 * 768 * BLOCKS - 300, 5, 3000):
        parts, residuals = ([torch.randn(vectors * 16 // dtype.itemsize).to(dtype) for _ in range(2)] for _ in range(2))
        total = parts[0] + parts[1]
        assert all(torch.equal(got, total) for got in two.sums(parts)), vectors
        for got, residual in zip(two.sums(parts, residuals), residuals, strict=True):
            assert torch.equal(got, total + residual), vectors


def test_memory_for_few_chunks_serves_parts_of_many(two):
    """Of 29 chunks a block, by memory for 8; then flags and epochs go on from there."""
    for vectors in (29 * 768 * BLOCKS, 256 * BLOCKS):
        parts = [torch.randint(-9, 9, (vectors * 4,)).float() for _ in range(2)]
        assert all(torch.equal(got, parts[0] + parts[1]) for got in two.sums(parts))
    assert all(torch.equal(epochs, torch.full_like(epochs, 30)) for epochs in two.epochs)


def test_zeros_keep_their_sign_where_there_is_no_residual(two):
    zeros = [torch.full((64,), -0.0) for _ in range(2)]
    assert all(got.signbit().all() for got in two.sums(zeros))


def test_tensors_at_addresses_that_vectors_cannot_have_are_copied(two):
    """Of the second process: those of the first would not live until both have launched."""
    parts, residuals = ([torch.randn(64), torch.randn(65)[1:]] for _ in range(2))
    for got, residual in zip(two.sums(parts, residuals), residuals, strict=True):
        assert torch.equal(got, parts[0] + parts[1] + residual)
