"""Where the weights of a model lie."""

from __future__ import annotations

import itertools

from torch import nn

from prefixkit.models.compile.packed_weights import packed_view


def storage_bytes(module):
    """Bytes of all storages that parameters and buffers lie in, each counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in module.state_dict().values()
    }
    return sum(storage.nbytes() for storage in storages.values())


def groups_of(model):
    """Of each decoder layer the projections whose weight is packed with that of the next one."""
    return [
        [
            f"{a.split('.')[-1]} {b.split('.')[-1]}"
            for (a, first), (b, second) in itertools.pairwise(layer.named_modules())
            if isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
            if packed_view([first.weight, second.weight]) is not None
        ]
        for layer in model.model.layers
    ]
