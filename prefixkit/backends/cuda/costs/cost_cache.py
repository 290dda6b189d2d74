"""The costs of attention on the GPUs here: measured once per machine and stored, or estimated from the H200's."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from prefixkit.attention.gpu.gpu_cost import H200, GpuCost, Role
from prefixkit.attention.sharing import CostModel
from prefixkit.backends.cuda.costs import calibrate, measure
from prefixkit.cuda import kernel_cache
from prefixkit.cuda.jit import driver_cuda
from prefixkit.cuda.nvrtc import CSRC
from prefixkit.paths import cache_dir, put

log = logging.getLogger("prefixkit")

# The H200 whose costs are the default.
H200_SMS, H200_TBPS = 132, 4.8


def path_of(device: torch.device) -> Path:
    """The file of a GPU's costs; its name depends on the GPU, the driver, our kernels and how they are measured."""
    name = torch.cuda.get_device_name(device)
    digest = sha256()
    for part in (name, driver_cuda(), H200):
        digest.update(repr(part).encode() + b"\0")
    for source in (*sorted(CSRC.rglob("*.cu*")), Path(calibrate.__file__), Path(measure.__file__)):
        digest.update(source.read_bytes())
    return cache_dir() / "costs" / f"{'-'.join(name.split())}-{digest.hexdigest()[:16]}.json"


def gpu_cost(device: torch.device) -> GpuCost:
    """The costs measured on this machine, or an estimate from the number of multiprocessors and the bandwidth."""
    return _known(device, str(cache_dir()))


@cache
def _known(device: torch.device, _: str) -> GpuCost:
    path = path_of(device)
    measured = read(path)
    if measured is not None:
        log.debug("costs of %s from %s", device, path)
        return measured
    properties = torch.cuda.get_device_properties(device)
    log.debug("costs of %s are estimated; `prefixkit warmup` measures them", device)
    return estimate(properties.multi_processor_count, bandwidth_tbps(device))


def estimate(num_sms: int, tbps: float) -> GpuCost:
    """The H200's costs, where ``num_sms`` multiprocessors share a bandwidth of ``tbps`` TB/s."""
    faster = tbps / H200_TBPS
    known, smaller = H200.sharing, H200_SMS / num_sms
    sharing = CostModel(
        item=known.item * smaller,
        kv_byte=known.kv_byte / faster,
        partial_byte=known.partial_byte / faster,
        tile_item=known.tile_item * smaller,
        decode_item=known.decode_item / faster,
        tile_path=known.tile_path,
        read_by_tiles=known.read_by_tiles,
    )
    return GpuCost(sharing, H200.tile, replace(H200.decode, tokens_per_us=H200.decode.tokens_per_us * faster * smaller))


def bandwidth_tbps(device: torch.device) -> float:
    """The bandwidth in TB/s by the memory's clock and width; the H200's if the driver does not report them."""
    from cuda.bindings import driver

    index = device.index if device.index is not None else torch.cuda.current_device()
    of = driver.CUdevice_attribute
    asked = of.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, of.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH
    clock, width = (int(driver.cuDeviceGetAttribute(each, driver.CUdevice(index))[1]) for each in asked)
    return clock * 1e3 * 2 * width / 8 / 1e12 or H200_TBPS


def measured_cost(device: torch.device) -> tuple[Path, GpuCost, bool]:
    """The costs of a GPU, from the disk if stored: the file, the costs, and whether they were measured now.

    Raises:
        ValueError: the times make no sense.
    """
    path = path_of(device)
    with kernel_cache.making(path):  # of processes that start together only one measures
        known = read(path)
        if known is not None:
            return path, known, False
        cost = calibrate.calibrate(device)
        write(path, cost)
    _known.cache_clear()
    return path, cost, True


def read(path: Path) -> GpuCost | None:
    """The costs in a file, or None if there is no file or it is damaged."""
    try:
        facts = json.loads(path.read_text())
        return GpuCost(CostModel(**facts["sharing"]), Role(**facts["tile"]), Role(**facts["decode"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("the costs in %s cannot be used (%s); they are estimated", path, error)
        return None


def write(path: Path, cost: GpuCost) -> bool:
    """Store costs if that is possible; a folder that cannot be written gets one line in the log."""
    try:
        put(path, (json.dumps(asdict(cost), indent=1) + "\n").encode())
    except OSError as error:
        log.warning("costs cannot be kept in %s (%s)", path.parent, error.strerror or error)
        return False
    return True
