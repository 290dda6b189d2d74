"""Whether a model is the same as in another run, without reading all of it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from prefixkit.kv.prefixes.write import Origin
from prefixkit.models.facts import ModelFacts
from prefixkit.models.families import pretrained_model, text_config
from prefixkit.models.tensor_parallel import agreement_of
from prefixkit.models.variants.layer_variants import variants_text
from prefixkit.models.weights.state import adapter_states

ELEMENTS = 256  # of each tensor
# Fields of a config that do not affect what a layer computes.
_NO_PART_OF_KV = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def model_fingerprint(model: Any, stop_token_ids: tuple[int, ...]) -> str:
    """SHA-256 of a model's parameters and buffers by name, shape and type, of some elements of each, and of its stops.

    Of each tensor, 256 evenly spaced elements are read: training changes some of them, but a single weight written by
    hand may not be among them.  A model that is split over processes has the same fingerprint as in one process; all
    processes must call this function.

    Args:
        model: A loaded model.
        stop_token_ids: The tokens that end its samples.
    """
    digest = hashlib.sha256(repr((type(model).__name__, sorted(stop_token_ids))).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        whole: Any = getattr(tensor, "full_tensor", tensor.detach)()
        flat = whole.detach().flatten()
        if flat.numel() and flat.device.type != "meta":
            count = min(ELEMENTS, flat.numel())
            places = torch.arange(count) * (flat.numel() - 1) // max(1, count - 1)
            digest.update(flat[places.to(flat.device)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def kv_fingerprint(model: Any) -> str:
    """SHA-256 of what a model's KV depends on: weights, read as by :func:`model_fingerprint`, config and adapters.

    Tokens that end samples are not included: they change which tokens follow, not their KV.

    Raises:
        UnsupportedModel: ``model`` contains no transformers model.
    """
    config = {
        name: value
        for name, value in text_config(model).to_diff_dict().items()
        if name not in _NO_PART_OF_KV and not name.endswith(("_token_id", "_token_ids"))
    }
    facts: list[Any] = [model_fingerprint(model, ()), config, adapter_states(model)]
    if (agreement := agreement_of(pretrained_model(model))).processes > 1:
        facts.append((agreement.rank, agreement.processes))  # each has the KV of its own heads
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def kv_origin(facts: ModelFacts) -> Origin:
    """The origin of a model's KV: its :func:`kv_fingerprint`, and the variants of attention that its layers apply."""
    return Origin(kv_fingerprint(facts.model), variants_text(facts.variants))
