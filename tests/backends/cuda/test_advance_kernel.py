"""The kernel of ``advance``, its own source run on the CPU, launch and all: it does what the op does in plain torch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda import kv as by_kernel
from prefixkit.backends.cuda.kernels import ADVANCE
from prefixkit.backends.torch.plain_kv import advance as by_torch
from prefixkit.cuda.nvrtc import CSRC
from prefixkit.runners.decode_tree import DecodeTree, TreeCapacity
from tests.emulation.build import write_headers
from tests.fake_gpu import pretend_to_launch
from tests.runners.test_decode_tree import make_batch

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

ON_CPU = """
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
struct Index { int x; };
static Index blockIdx, threadIdx;
static long long max(long long a, long long b) { return a < b ? b : a; }
#define advance advance_rows  // libc has an advance of its own
#include "kv/advance.cu"
extern "C" void advance_on_cpu(const prefixkit::Advance* a, int blocks, int threads) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) prefixkit::advance_rows(*a);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advance")
    (folder / "on_cpu.cpp").write_text(ON_CPU)
    made = folder / "advance.so"
    write_headers(folder, ADVANCE.headers)
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}", f"-I{folder}"]
    subprocess.run(["g++", *options, "-o", made, folder / "on_cpu.cpp"], check=True)
    return ctypes.CDLL(str(made))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_steps_are_those_of_torch(seed, page_size, library, monkeypatch):
    print("seed", seed)
    rng = np.random.default_rng(seed)
    _, _, batch = make_batch(rng, page_size, 5)

    def launch(function, layout, values, grid, block, shared, say):
        library.advance_on_cpu(layout.packer.pack(*values), grid[0], block)

    unit = {ADVANCE.names[0]: SimpleNamespace(name="advance", parameter_bytes=88)}
    pretend_to_launch(monkeypatch, by_kernel, lambda *rest: unit, launch)
    space = TreeCapacity(200, 128, 2048)
    theirs, ours = (DecodeTree(space, page_size, "cpu") for _ in range(2))
    theirs.upload(batch), ours.upload(batch)
    for _ in range(8):  # past the last pages
        drawn = torch.from_numpy(rng.integers(-1, 50, 200))
        theirs.sampled, ours.sampled = drawn, drawn.clone()
        rows = int(rng.integers(batch.queries.num_rows, 201))
        for tree, advance in ((theirs, by_torch), (ours, by_kernel.advance)):
            step = (tree.sampled, tree.tokens, tree.positions, tree.slots)
            advance(tree.leaf, *tree.nodes, *step, rows, page_size)
        for name in ("tokens", "positions", "slots"):
            assert torch.equal(getattr(ours, name)[:rows], getattr(theirs, name)[:rows]), name
        assert all(torch.equal(a, b) for a, b in zip(ours.nodes, theirs.nodes, strict=True))
