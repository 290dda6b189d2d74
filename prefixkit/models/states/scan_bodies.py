"""The classes with states whose own code cannot continue a state by several tokens, by file and name.

No file of a model is imported here: a class is looked up when a model contains it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.integrations.accelerate import force_accelerate_hooks

from prefixkit.models.own_attention.own_code import transformers_name
from prefixkit.models.requirements import name_cache
from prefixkit.models.states.griffin import griffin
from prefixkit.models.states.lightning import lightning
from prefixkit.models.states.mamba import mamba, normed, of_each_head, plain

Body = Callable[..., Any]

# What wraps the class's own ``forward`` in a body, and the modules whose weights the body reads without calling them.
_KNOWN: dict[tuple[str, str] | None, tuple[Callable[[Body], Body], list[str]]] = {
    ("falcon_mamba", "FalconMambaMixer"): (functools.partial(mamba, parameters=normed), ["conv1d", "dt_proj"]),
    ("jamba", "JambaMambaMixer"): (functools.partial(mamba, parameters=normed), ["conv1d", "dt_proj"]),
    ("mamba", "MambaMixer"): (functools.partial(mamba, parameters=plain), ["conv1d", "dt_proj"]),
    ("minimax", "MiniMaxLightningAttention"): (lambda original: lightning, []),
    ("recurrent_gemma", "RecurrentGemmaRecurrentBlock"): (lambda original: griffin, ["conv_1d", "rg_lru"]),
    ("zamba", "ZambaMambaMixer"): (functools.partial(mamba, parameters=of_each_head, heads=True), ["conv1d"]),
}


@functools.cache
def states_body(cls: type[nn.Module]) -> Body | None:
    """The function to call instead of ``cls.forward``, with the same arguments, if the cache holds states of segments.

    The cache has one ``LinearAttentionLayer`` of transformers for the module, with the states of each segment of the
    batch or, at the start of texts, without states; the states after the segments are read from it. No token is
    padding.

    Returns:
        The body; None for a class whose own ``forward`` can continue states.
    """
    if (known := _KNOWN.get(transformers_name(cls))) is None:
        return None
    make, read = known
    own = make(cls.forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **name_cache(kwargs))

    body: Body = force_accelerate_hooks(read)(run)
    return body
