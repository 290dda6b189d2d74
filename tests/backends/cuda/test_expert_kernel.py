"""Products with experts: the kernel's own source on the CPU, block by block, with its launch, against float64."""

from __future__ import annotations

import ctypes
import shutil
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda.experts import expert_product
from prefixkit.backends.cuda.kernels import EXPERT_STAGES, expert_name, expert_unit
from prefixkit.ops.arguments import BadShape
from tests.emulation.build import build
from tests.fake_gpu import pretend, pretend_to_launch

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

SHARED_MEMORY = {"extern __shared__ __align__(128) unsigned char stages[];": "unsigned char* const stages = memory;"}
DTYPES = (torch.bfloat16, torch.float16)
KINDS = {expert_name(along_n, stages): (along_n, stages) for along_n in (False, True) for stages in EXPERT_STAGES}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    instead = {"experts/expert_product.cu": next(iter(SHARED_MEMORY.items()))}
    return [
        build(
            tmp_path_factory.mktemp("experts"),
            "experts",
            instead,
            expert_unit(half).headers,
            f"-DPREFIXKIT_HALF={half:d}",
        )
        for half in (False, True)
    ]


class Gpu:
    """A GPU of compute capability 8.0 that has nothing but this kernel; remembers which kinds were launched."""

    max_shared = 163 * 1024 - 8320

    def __init__(self, libraries):
        self.libraries, self.launched = libraries, []

    def load(self, unit, device):
        half = next(half for half in (False, True) if unit == expert_unit(half))
        size = len(bytes(self.struct))
        return {
            name: SimpleNamespace(name=(half, kind), parameter_bytes=size, max_shared=self.max_shared)
            for name, kind in KINDS.items()
        }

    struct = b"\0" * (8 * 8 + 5 * 4 + 4)

    def launch(self, function, layout, values, grid, block, shared, describe):
        half, (along_n, stages) = function.name
        assert block == 256 and shared == stages * 24 * 1024 and grid[2] == 1
        packed = ctypes.create_string_buffer(layout.packer.pack(*values), len(self.struct))
        if grid[1]:
            size = self.libraries[half].experts_on_cpu(packed, along_n, stages, *grid[:2])
            assert size == len(self.struct)
        self.launched.append((along_n, stages))


@pytest.fixture
def gpu(libraries, monkeypatch):
    gpu = Gpu(libraries)
    pretend(monkeypatch, (8, 0))
    pretend_to_launch(monkeypatch, expert_product, gpu.load, gpu.launch)
    return gpu


def check(dtype, experts, k, n, tokens, per, along_n, shared, bias, chosen=None):
    """Sums of float32, rounded once: within half a unit of the result, and what float32 loses on the way."""
    x = torch.randn(tokens if shared else tokens * per, k).to(dtype)
    weight = torch.randn(experts, k, n) if along_n else torch.randn(experts, n, k).transpose(1, 2)
    weight, added = weight.to(dtype), torch.randn(experts, n).to(dtype) if bias else None
    index = torch.randint(0, experts, (tokens, per)) if chosen is None else chosen
    out = expert_product.expert_product(x, weight, added, index, per if shared else 1)
    truth, size = torch.zeros(2, tokens * per, n, dtype=torch.float64)
    for pair, expert in enumerate(index.flatten().tolist()):
        if 0 <= expert < experts:
            row, matrix = x[pair // per if shared else pair].double(), weight[expert].double()
            offset = added[expert].double() if bias else 0
            truth[pair], size[pair] = row @ matrix + offset, row.abs() @ matrix.abs() + abs(offset)
    bound = torch.finfo(dtype).eps / 2 * truth.abs() + 1e-6 * size
    assert ((out.double() - truth).abs() <= bound).all()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("along_n", [False, True], ids=["along k", "along n"])
@pytest.mark.parametrize(("most", "stages"), [(99, 3), (163, 3), (227, 4)])
def test_rows_get_the_products_of_their_experts(dtype, along_n, most, stages, gpu):
    """On GPUs whose blocks have so many KB of shared memory at most."""
    gpu.max_shared = most * 1024 - 8320
    for experts, k, n, tokens, per, shared, bias in (
        (3, 64, 128, 9, 2, True, True),  # whole tiles of weights
        (2, 200, 136, 5, 3, False, True),  # tiles that end
        (1, 8, 8, 70, 1, True, False),  # more than one tile of rows
        (2, 328, 24, 33, 1, True, True),  # more steps than stages
    ):
        check(dtype, experts, k, n, tokens, per, along_n, shared, bias)
    assert set(gpu.launched) == {(along_n, stages)}


def test_pairs_of_experts_that_do_not_exist_get_zeros(gpu):
    chosen = torch.tensor([[0, 2], [-1, 1], [1, 2**40], [0, 1]])
    check(torch.bfloat16, 2, 16, 144, 4, 2, True, True, True, chosen)


def test_more_pairs_than_a_window_holds(gpu):
    check(torch.bfloat16, 2, 8, 8, 2100, 2, True, True, True, torch.tensor([0, 1]).expand(2100, 2).contiguous())


def test_no_pair_launches_no_block(gpu):
    check(torch.bfloat16, 2, 8, 8, 0, 2, True, True, True)
    assert gpu.launched


def test_rows_apart_are_read_where_they_are_and_others_are_copied(gpu):
    weight, index = torch.randn(2, 8, 8).bfloat16(), torch.tensor([[0], [1]])
    wide = torch.randn(2, 16).bfloat16()
    for x in (wide[:, 8:], wide[:, 1:9], torch.randn(8, 2).bfloat16().T):
        out = expert_product.expert_product(x, weight, None, index, 1)
        assert torch.allclose(out.double(), (x[:, None].double() @ weight.double())[:, 0], rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(("k", "n"), [(12, 8), (8, 12)])
def test_sizes_that_vectors_do_not_divide_are_refused(k, n, gpu):
    with pytest.raises(BadShape, match="multiples of 8"):
        check(torch.bfloat16, 2, k, n, 3, 1, True, True, False)
