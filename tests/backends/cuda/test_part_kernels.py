"""The kernels of ``sum_parts`` and ``gather_parts``: their source on the CPU, as two processes whose threads linger."""

from __future__ import annotations

import ctypes
import shutil
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda import layouts, part_kernels
from prefixkit.backends.cuda.kernels import GATHER_PARTS, SHARED_PARTS
from prefixkit.ops.shared_parts import BLOCKS, SHARED_BYTES, addresses_of
from tests.emulation.build import build
from tests.fake_gpu import pretend, pretend_to_launch
from tests.ops.sent_parts import sent, sum_of

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

KERNELS = dict(zip(SHARED_PARTS.names, range(4), strict=True))  # as the emulation numbers them
PLACE = 256 * 4  # vectors of a block


class TwoProcesses:
    """Two GPUs that have nothing but these kernels; a launch waits for that of the other one."""

    def __init__(self, library, seed):
        self.library, self.seed, self.waiting = library, seed, []
        self.memory = [torch.zeros(SHARED_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.epochs = [torch.zeros(BLOCKS, dtype=torch.int32) for _ in range(2)]
        pairs = zip(self.memory, reversed(self.memory), self.epochs, strict=True)
        self.addresses = [addresses_of(own, theirs, epochs) for own, theirs, epochs in pairs]

    def load(self, unit, device):
        assert unit == SHARED_PARTS
        sizes = {name: (layouts.GATHER_PARTS if name == GATHER_PARTS else layouts.SUM_PARTS).size for name in KERNELS}
        return {name: SimpleNamespace(name=name, parameter_bytes=size) for name, size in sizes.items()}

    def launch(self, function, layout, values, grid, block, shared, describe):
        assert (
            block == 512
            and shared == (0 if function.name == GATHER_PARTS else 4096 * 16)
            and grid[0] <= BLOCKS
            and grid[1:] == (1, 1)
        )
        packed = ctypes.create_string_buffer(layout.packer.pack(*values), layout.size)
        self.waiting.append((packed, KERNELS[function.name], grid[0]))
        if len(self.waiting) == 2:
            (one, *form), (other, *same) = self.waiting
            assert form == same
            self.waiting.clear()
            assert self.library.run_on_cpu(one, other, *form, self.seed) == layout.size

    def sums(self, parts, dtype=torch.float32, residuals=((), ())):
        both = zip(parts, self.addresses, residuals, strict=True)
        return [part_kernels.sum_parts(part, own, dtype, *residual) for part, own, residual in both]

    def gathered(self, parts, sent=((), ())):
        both = enumerate(zip(parts, self.addresses, sent, strict=True))
        return [part_kernels.gather_parts(part, own, rank, *other) for rank, (part, own, other) in both]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("parallel"), "parallel", {}, SHARED_PARTS.headers)


@pytest.fixture
def two(library, monkeypatch):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    torch.manual_seed(seed)
    two = TwoProcesses(library, seed % 2**31)
    pretend(monkeypatch, (9, 0), (9, 0))
    pretend_to_launch(monkeypatch, part_kernels, two.load, two.launch)
    return two


@pytest.fixture
def few_blocks(monkeypatch):
    """Of every launch; a block has many chunks of few numbers."""
    monkeypatch.setattr(part_kernels, "BLOCKS", 3)
    return 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_get_the_sum_and_each_its_residuals_rounded_like_torch(dtype, two, few_blocks):
    """One vector, part of a chunk, parts of several chunks; and blocks of other numbers in turns."""
    for vectors in (1, 700, 5 * PLACE * few_blocks - 300, 5, 3000):
        parts = [torch.randn(vectors * 16 // dtype.itemsize) for _ in range(2)]
        assert all(torch.equal(got, sum_of(parts, dtype)) for got in two.sums(parts, dtype)), vectors
        for count in (1, 2):
            residuals = [[torch.randn_like(part).to(dtype) for _ in range(count)] for part in parts]
            for got, own in zip(two.sums(parts, dtype, residuals), residuals, strict=True):
                assert torch.equal(got, sum_of(parts, dtype, *own)), (vectors, count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_cross_the_link_in_16_bytes_for_eight_numbers_of_any_size(dtype, two):
    """Of all exponents, within eight numbers as well; zeros; numbers that round up to a power of two."""
    random = torch.randint(-(2**31), 2**31, (2, 4096), dtype=torch.int64).int().view(torch.float32)
    random[~random.isfinite()] = 1
    spread = torch.randn(2, 4096) * 2.0 ** torch.randint(-30, 1, (2, 4096))
    nearly = torch.full((2, 4096), 2.0).nextafter(torch.tensor(0.0)) * (2 * torch.randint(2, (2, 4096)) - 1)
    small = torch.randn(2, 4096) * 2.0**-120
    for parts in (random, spread, nearly, small, torch.zeros(2, 64), -torch.zeros(2, 64)):
        for got in two.sums([*parts], dtype):
            assert torch.equal(got, sum_of([*parts], dtype))


def test_no_number_is_off_by_more_than_a_part_of_the_largest_of_its_eight():
    part = torch.randn(8192)
    error = (sent(part) - part).abs().view(-1, 8)
    assert bool((error <= 2.0**-14 * part.abs().view(-1, 8).amax(1, keepdim=True)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_infinities_and_nan_stay_what_they_are(dtype, two):
    parts = [torch.randn(64) for _ in range(2)]
    parts[0][3], parts[0][17], parts[0][40], parts[1][41] = torch.inf, -torch.inf, torch.inf, -torch.inf
    parts[1][3] = -torch.inf
    parts[0][57] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # a NaN of low bits alone
    for got in two.sums(parts, dtype):
        assert torch.equal(got.nan_to_num(9.0, 8.0, -8.0), sum_of(parts, dtype).nan_to_num(9.0, 8.0, -8.0))
        assert got.isnan().nonzero().flatten().tolist() == [3, 57]


def test_memory_for_few_chunks_serves_parts_of_many(two, few_blocks):
    """Of 29 chunks a block, by memory for 8; then flags and epochs go on from there."""
    for vectors in (29 * PLACE * few_blocks, 256 * few_blocks):
        parts = [torch.randint(-9, 9, (vectors * 4,)).float() for _ in range(2)]
        assert all(torch.equal(got, parts[0] + parts[1]) for got in two.sums(parts))
    for epochs in two.epochs:
        assert epochs.tolist() == [30] * few_blocks + [0] * (BLOCKS - few_blocks)


def test_both_get_the_columns_of_both_side_by_side(two):
    """Rows of one vector, of several, of more than a block takes at once; of several dimensions, and on all blocks."""
    sizes = (1, 1), (3, 7), (2, 3, 5), (700, 1), (2, 5000), (301, 299)
    for (*rows, vectors), dtype in zip(sizes, cycle((torch.float32, torch.bfloat16, torch.float16))):
        parts = [torch.randn(*rows, vectors * 16 // dtype.itemsize).to(dtype) for _ in range(2)]
        assert all(torch.equal(got, torch.cat(parts, -1)) for got in two.gathered(parts)), (rows, vectors)


def test_each_gets_the_columns_that_the_other_sends_beside_its_own(two, few_blocks):
    for rows, vectors in ((1, 1), (3, 7), (5, 5000), (301, 29)):
        mine, sent = torch.randn(2, 2, rows, vectors * 4)
        first, second = two.gathered([*mine], [[one] for one in sent])
        assert torch.equal(first, torch.cat((mine[0], sent[1]), -1)), (rows, vectors)
        assert torch.equal(second, torch.cat((sent[0], mine[1]), -1)), (rows, vectors)


def test_sums_and_gathers_follow_each_other_in_any_order(two, few_blocks):
    """Chunks of gathers take two places, and begin at any after those of sums: memory may end within one."""
    sizes = torch.tensor([1, PLACE * few_blocks - 5, 5 * PLACE * few_blocks + 9, 12 * PLACE * few_blocks])
    for step, vectors in enumerate(sizes[torch.randint(len(sizes), (40,))].tolist()):
        parts = [torch.randint(-9, 9, (vectors * 8,)).float() for _ in range(2)]
        if torch.rand(()) < 0.5:
            assert all(torch.equal(got, (parts[0] + parts[1]).half()) for got in two.sums(parts, torch.half)), step
        else:
            parts = [part.half() for part in parts]
            assert all(torch.equal(got, torch.cat(parts)) for got in two.gathered(parts)), step
    assert torch.equal(*two.epochs)


def test_zeros_keep_their_sign_where_there_is_no_residual(two):
    zeros = [torch.full((64,), -0.0) for _ in range(2)]
    assert all(got.signbit().all() for got in two.sums(zeros))


def test_tensors_at_addresses_that_vectors_cannot_have_are_copied(two):
    """Of the second process: those of the first would not live until both have launched."""
    parts = [torch.randn(64), torch.randn(65)[1:]]
    residuals = [[torch.randn(64)], [torch.randn(65)[1:]]]
    for got, residual in zip(two.sums(parts, torch.float32, residuals), residuals, strict=True):
        assert torch.equal(got, parts[0] + parts[1] + residual[0])
    assert all(torch.equal(got, torch.cat(parts)) for got in two.gathered(parts))
    first, second = two.gathered(parts, [[torch.randn(64)], [sent := torch.randn(65)[1:]]])
    assert torch.equal(first[64:], sent) and torch.equal(second[64:], parts[1])
