"""A pytest plugin for several GPUs: the first GPU that a worker sees is another one for each, and all see all of them.

CUDA_VISIBLE_DEVICES=0,1,2,3 pytest -n 40 -p tests.gpu.first_gpu tests/gpu
"""

from __future__ import annotations

import os


def rotated(devices: str, worker: str) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a worker of pytest-xdist (gw0, gw1, ...), from that of all."""
    every = devices.split(",")
    first = int(worker.removeprefix("gw")) % len(every)
    return ",".join(every[first:] + every[:first])


if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and (_all := os.environ.get("CUDA_VISIBLE_DEVICES")):
    os.environ["CUDA_VISIBLE_DEVICES"] = rotated(_all, _worker)
