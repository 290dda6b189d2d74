"""``expert_product`` by our kernel, and the number of rows per expert up to which it is used."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import EXPERT_STAGES, expert_name, expert_unit
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.ops.arguments import BadShape

_THREADS, _COLUMNS, _STAGE_BYTES, _BESIDE_STAGES = 256, 128, 24 * 1024, 9344
# The kernel reads an expert's matrix again for every 64 rows, and some experts have far more rows than the mean.
_MEAN_PAIRS = 24


def expert_product(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, per: int) -> Tensor:
    """``expert_product``."""
    experts, k, n = weight.shape
    pairs = index.numel()
    along_n = weight.stride(2) == 1
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    strides = x.stride(0), weight.stride(0), weight.stride(1) if along_n else weight.stride(2)
    if any(size % 8 for size in (k, n, *strides)) or (x.data_ptr() | weight.data_ptr()) % 16:
        raise BadShape(
            "expert_product: sizes and strides must be multiples of 8, addresses of 16 bytes, got x "
            f"{list(x.shape)} {x.stride()}, weight {list(weight.shape)} {weight.stride()}"
        )
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    function, stages = _function(x.dtype == torch.float16, along_n, x.device.index)
    pointers = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), index.data_ptr(), out.data_ptr()
    grid = (-(-n // _COLUMNS), experts if pairs else 0, 1)
    describe = f"expert_product on {x.device}: {list(x.shape)} {x.dtype}, {list(weight.shape)}, {pairs} pairs".__str__
    values = (*pointers, *strides, pairs, per, experts, k, n)
    launch(function, layouts.EXPERT_PRODUCT, values, grid, _THREADS, stages * _STAGE_BYTES, describe)
    return out


def most_pairs(device: torch.device, dtype: torch.dtype) -> float:
    """See :attr:`Backend.expert_pairs`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return 0
    # On these GPUs torch's grouped product has a kernel that reads offsets on the device; elsewhere the host waits.
    grouped = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return _MEAN_PAIRS if grouped else math.inf


def _function(half: bool, along_n: bool, device: int) -> tuple[jit.Function, int]:
    """The kernel with the most stages for which two blocks fit on a multiprocessor, else with the fewest."""
    functions = jit.load(expert_unit(half), device)
    for stages in EXPERT_STAGES:
        function = functions[expert_name(along_n, stages)]
        # A multiprocessor has the shared memory that one block can have; two blocks need stages and a second list.
        if 2 * stages * _STAGE_BYTES + _BESIDE_STAGES <= function.max_shared:
            break
    return layouts.EXPERT_PRODUCT.check(function), stages
