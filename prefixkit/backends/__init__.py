"""Implementations of the ops: plain torch, and our CUDA kernels.  Importing this package registers them."""

from __future__ import annotations

import torch

from prefixkit.ops.backend import Backend, Choice, register


def _load_torch() -> Backend:
    from prefixkit.backends.torch.backend import BACKEND

    return BACKEND


def _load_cuda() -> Backend:
    from prefixkit.backends.cuda.backend import BACKEND

    return BACKEND


def _probe_cuda(device: torch.device) -> Choice:
    from prefixkit.backends.cuda.probe import probe

    return probe(device)


register("torch", _load_torch)
register("cuda", _load_cuda, _probe_cuda)
