"""The classes with states whose own code does not continue a state by several tokens, by file and name.

Nothing of transformers is imported here: a class is looked up once a model brings it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from prefixkit.models.states.griffin import griffin
from prefixkit.models.states.lightning import lightning
from prefixkit.models.states.mamba import mamba, normed, of_each_head, plain

Body = Callable[..., Any]

# What makes a body of the class's own ``forward``.
_KNOWN: dict[tuple[str, str], Callable[[Body], Body]] = {
    ("falcon_mamba", "FalconMambaMixer"): functools.partial(mamba, parameters=normed),
    ("jamba", "JambaMambaMixer"): functools.partial(mamba, parameters=normed),
    ("mamba", "MambaMixer"): functools.partial(mamba, parameters=plain),
    ("minimax", "MiniMaxLightningAttention"): lambda original: lightning,
    ("recurrent_gemma", "RecurrentGemmaRecurrentBlock"): lambda original: griffin,
    ("zamba", "ZambaMambaMixer"): functools.partial(mamba, parameters=of_each_head, heads=True),
}


@functools.cache
def states_body(cls: type[nn.Module]) -> Body | None:
    """What to call in place of ``cls.forward``, with the same arguments, where the cache holds states of segments.

    The cache has one layer of transformers' ``LinearAttentionLayer`` for the module, with the states of each segment of
    the batch or, at the start of texts, with none; the states after the segments are read from it. No token is padding.

    Returns:
        The body; None for a class whose own ``forward`` does all that.
    """
    folder = cls.__module__.rpartition(".modeling_")[2]
    if cls.__module__ != f"transformers.models.{folder}.modeling_{folder}":
        return None
    make = _KNOWN.get((folder, cls.__qualname__))
    return make(cls.forward) if make else None
