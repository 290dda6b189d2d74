"""Tokenizers and models by name or folder, or the demo's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from prefixkit.cli.terminal import line
from prefixkit.evaluation.demo.model import demo_folder

DEMO = "demo"
DTYPES = ("auto", "float32", "bfloat16", "float16")


class NeedsRemoteCode(ValueError):
    """The model or its tokenizer is Python code in its own folder, which the command line never runs."""


def resolve(name: str, console: Console) -> str:
    """The argument of ``from_pretrained`` for ``--model name``; the demo's model is downloaded if it is missing."""
    if name != DEMO:
        return name
    return str(demo_folder(lambda message: console.print(line(f"{message} …"))))


def load_tokenizer(location: str, revision: str | None = None) -> Any:
    from transformers import AutoTokenizer

    with _loading(location, "tokenizer"):
        return AutoTokenizer.from_pretrained(location, revision=revision or "main", trust_remote_code=False)


def load_model(
    location: str,
    dtype: str,
    device: str,
    revision: str | None = None,
    *,
    split: bool = False,
    kv_dtype: str | None = None,
) -> Any:
    """The patched model, in evaluation mode; ``auto`` is the dtype that the weights are stored in.

    ``split``: the model is split over the processes that torchrun has started, each with its own device;
    ``kv_dtype``: see :func:`prefixkit.patch`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.utils import logging as transformers_logging

    from prefixkit.models import patch

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # commands have a bar of their own
    with _loading(location, "model"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            location,
            dtype=dtype,
            revision=revision or "main",
            trust_remote_code=False,
            distributed_config=DistributedConfig(tp_plan="auto") if split else None,
        )
    return patch((model if split else model.to(device)).eval(), kv_dtype=kv_dtype)  # type: ignore[arg-type]  # checked


def empty_model(location: str, dtype: str) -> Any:
    """The model without its weights: shapes and types only, nothing downloaded but its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from prefixkit.torch_private import without_memory

    with _loading(location, "config"):
        config: Any = AutoConfig.from_pretrained(location, trust_remote_code=False)
    stored = getattr(config.get_text_config(), "dtype", None)
    wanted = (stored or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with _loading(location, "model"), without_memory():  # tensors with shape, type and device, but no memory
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=wanted, trust_remote_code=False
        )


@contextmanager
def _loading(location: str, what: str) -> Iterator[None]:
    """Name the folder and the remedy if transformers cannot load ``what``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise NeedsRemoteCode(
                f"{location} needs Python code of its own for its {what}, and the command line runs no model's code; "
                "give a model of a family that transformers has, or read that code and, if you trust it, load the "
                "model in Python with from_pretrained(..., trust_remote_code=True) and call prefixkit.patch and "
                "prefixkit.generate"
            ) from error
        if not Path(location).is_dir() and (isinstance(error, OSError) or "Repo id must" in str(error)):
            raise OSError(f"there is no folder {location}, and the hub gave no {what} of that name: {error}") from error
        # The errors of safetensors and tokenizers derive from Exception itself.
        known = isinstance(error, ValueError | TypeError | OSError | ImportError | MemoryError | RuntimeError)
        if known and not isinstance(error, json.JSONDecodeError):
            if isinstance(error, ValueError) and location not in str(error):
                raise ValueError(f"cannot load the {what} of {location}: {error}") from error
            raise
        raise OSError(
            f"cannot load the {what} of {location} ({type(error).__name__}: {error}); its files may be damaged or cut "
            "short: copy or download them again"
        ) from error


def check_dtype(dtype: str, kv_dtype: str | None = None) -> None:
    """Refuse, before anything is loaded, a dtype in which models do not run, or which pages do not hold."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    from prefixkit.models.kv_dtype import KV_DTYPES

    if kv_dtype not in (None, *KV_DTYPES):
        raise ValueError(f"--kv-dtype must be {' or '.join(KV_DTYPES)}, or left out, got {kv_dtype}")


def choose_device(device: str) -> tuple[str, str]:
    """The device to use, and a line about it; ``auto`` is the GPU with the most free memory, else the CPU; ValueError
    if torch does not see the device.
    """
    if device != "auto":
        check_device(device)
        return device, ""
    import torch

    free = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    best = max(range(len(free)), key=lambda i: free[i][0], default=None)
    if best is None or free[best][0] < free[best][1] / 2:
        why = "torch sees no GPU" if best is None else "more than half of each GPU's memory is taken"
        return "cpu", f"on the CPU: {why}"
    name, room = torch.cuda.get_device_name(best), f"{free[best][0] / 2**30:.0f} GiB free"
    return f"cuda:{best}", f"on cuda:{best} ({name}, {room})"


def check_processes(device: str) -> None:
    """Refuse, before anything is loaded, to split a model where torchrun has not started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError(
            "--tensor-parallel splits the model over processes, and there is one; run torchrun --nproc-per-node 2 -m "
            "prefixkit sample, with the number of GPUs, and the same options"
        )
    if device != "auto":
        raise ValueError(f"--device {device}: under --tensor-parallel each process takes its own GPU; leave it out")


def check_device(device: str, gpus: int | None = None, option: str = "--device") -> None:
    """Refuse, before anything is loaded, a device of another type than cpu or cuda, or beyond ``gpus`` (None: torch's
    number of GPUs); ``option`` named it.
    """
    import torch

    asked = re.fullmatch(r"cpu|cuda(?::(\d+))?", device, re.ASCII)
    if asked is None:
        raise ValueError(f"{option} must be a torch device of type cpu or cuda, such as cuda:0, or auto; got {device}")
    if device == "cpu":
        return
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise ValueError(f"{option} {device}: torch {torch.__version__} sees no CUDA device; leave it out for the CPU")
    if int(asked[1] or 0) >= gpus:
        raise ValueError(f"{option} {device}: torch sees {gpus} CUDA devices, cuda:0 to cuda:{gpus - 1}")
