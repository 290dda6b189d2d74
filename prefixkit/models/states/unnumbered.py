"""Modules that do not know which layer they are in, and so not what of a cache is theirs.

Zamba's attention is told with each call, for its layers share its weights (each has a module of its own); a recurrent
block of RecurrentGemma stores its states in itself.
"""

from __future__ import annotations

import re

from torch import nn

from prefixkit.models.attention_class import original_class

_UNNUMBERED = {
    ("transformers.models.recurrent_gemma.modeling_recurrent_gemma", "RecurrentGemmaRecurrentBlock"),
    ("transformers.models.zamba.modeling_zamba", "ZambaAttention"),
    ("transformers.models.zamba2.modeling_zamba2", "Zamba2Attention"),
}
_PLACE = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def numbers_by_place(model: nn.Module) -> dict[str, int]:
    """The layers of a model's modules that do not know theirs, patched or not, by the names of the modules."""
    found = {}
    for name, module in model.named_modules():
        cls = original_class(module)
        if (cls.__module__, cls.__qualname__) in _UNNUMBERED and (place := _PLACE.search(name)):
            found[name] = int(place[1])
    return found
