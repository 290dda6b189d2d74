"""Tokenizers and models by name or folder, or the demo's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefixkit.demo.model import demo_folder

DEMO = "demo"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def resolve(name: str, say: Callable[[str], None]) -> str:
    """What ``from_pretrained`` is given for ``--model name``; the demo's model is downloaded where it is missing."""
    return str(demo_folder(say)) if name == DEMO else name


def load_tokenizer(location: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(location)


def load_model(location: str, dtype: str, device: str) -> Any:
    """The patched model, in evaluation mode.

    Args:
        dtype: One of `DTYPES`; ``auto`` is the type the weights are stored in.
    """
    from transformers import AutoModelForCausalLM

    from prefixkit.models import patch

    _check_device(device)
    model: Any = AutoModelForCausalLM.from_pretrained(location, dtype=dtype)
    return patch(model.to(device).eval())


def empty_model(location: str, dtype: str) -> Any:
    """The model without its weights: shapes and types only, nothing downloaded but its config."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(location)
    stored = getattr(config.get_text_config(), "dtype", None)
    wanted = (stored or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with FakeTensorMode():  # tensors with shape, type and device, but no memory
        return AutoModelForCausalLM.from_config(config, dtype=wanted)  # type: ignore[no-untyped-call]


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"--device must be a torch device such as cpu or cuda, got {device}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch {torch.__version__} sees no CUDA device; leave it out for the CPU")
