"""How position rotates the queries of a model's layers, measured with the same tokens at two places in a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefixkit.attention.rotation import Rotation, angles, rotate
from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.models.families import known_positions
from prefixkit.models.model_errors import UnsupportedVariant
from prefixkit.models.probe.measured import ORDER, ROWS, close
from prefixkit.models.probe.passes import rows_at

_FURTHEST = 1 << 14


def measure_rotations(model: PreTrainedModel, layers: Sequence[LayerKind]) -> tuple[Rotation | None, ...]:
    """How position rotates the heads of each layer; None if queries do not change with their position.

    The frequencies of the model's rotary embeddings (``inv_freq``) are tried in both orders of pairs, and compared with
    the queries that the model computes for four tokens at two places.

    Raises:
        UnsupportedVariant: queries of a layer change in another way, or the model has no weights to run.
    """
    moved = max(0, min(_FURTHEST, known_positions(model) - 4 * ROWS))
    if model.device.type == "meta":
        raise UnsupportedVariant(f"{type(model).__name__} has no weights, so that it is not known how queries turn")
    here = torch.tensor(ORDER, device=model.device)
    found = list[Rotation | None]()
    for place, (kind, *queries) in enumerate(
        zip(layers, rows_at(model, here), rows_at(model, here + moved), strict=True)
    ):
        size = kind.heads * kind.k_dim
        near, far = (rows[:, :size].reshape(ROWS, kind.heads, kind.k_dim) for rows in queries)
        if close(near, far, kind.dtype):
            found.append(None)
            continue
        rotation = next((one for one in _candidates(model, kind) if _turns(one, near, far, here, moved, kind)), None)
        if rotation is None:
            raise UnsupportedVariant(
                f"attention layer {place} of {type(model).__name__}: its queries do not turn with their position as "
                "rotary embedding of a fixed inv_freq does, so they cannot be turned to positions in the cache; take "
                "variants.streaming, which leaves positions as they are"
            )
        found.append(rotation)
    return tuple(found)


def _candidates(model: nn.Module, kind: LayerKind) -> Iterator[Rotation]:
    """The rotations given by the frequencies of the model's rotary embeddings."""
    seen = set[Rotation]()
    for module in model.modules():
        for name, value in [*module.named_buffers(recurse=False), *vars(module).items()]:
            if not isinstance(value, Tensor) or not name.endswith("inv_freq") or "original" in name or value.ndim != 1:
                continue
            frequencies = tuple(value.float().tolist())
            for interleaved in (False, True):
                rotation = Rotation(frequencies, interleaved)
                if 2 * len(frequencies) <= kind.k_dim and rotation not in seen:
                    seen.add(rotation)
                    yield rotation


def _turns(rotation: Rotation, near: Tensor, far: Tensor, here: Tensor, moved: int, kind: LayerKind) -> bool:
    frequencies, here = torch.tensor(rotation.frequencies, device=near.device), here.to(near.device)
    return close(rotate(near, angles(frequencies, here, here + moved), rotation.interleaved), far, kind.dtype)
