"""How a module that keeps a state continues from a stored state, measured on the tokens of a probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.kv.state_pool import StateTensor
from prefixkit.models.states.mixer_class import run_texts
from prefixkit.torch_private import fake_mode_of

# The largest allowed error, as a share of the change of the result if the state were lost.
_ALLOWED = 0.02

Refuse = Callable[[str], None]


def measure_state(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int, refuse: Refuse | None = None
) -> tuple[Any, tuple[StateTensor, ...], int]:
    """The module's output if each of the tokens is a text of its own, the state tensors that it keeps of a text, and
    the layer of the model's cache in which it keeps them.

    Args:
        module, args, kwargs: The module, and the arguments that it was called with for ``[1, tokens]``.
        tokens: The number of tokens, at least four.
        refuse: Raises an error; called if continuing from a state gives another result than one text.  None: not
            checked.
    """

    def run(begin: int, end: int, states: Sequence[StateTensor] = (), values: Sequence[Tensor] | None = None) -> Any:
        return run_texts(module, args, kwargs, tokens, lambda packed: packed[:, begin:end], states, values)

    rows, cache = run_texts(module, args, kwargs, tokens, lambda packed: packed.transpose(0, 1))
    states = tuple(cache.found())
    measured = _in_a_row(rows), states, cache.layer_idx
    if refuse is None:
        return measured
    if not states:
        refuse("keeps nothing of a text in its cache")
    if (made := _tensor(rows)).is_meta or fake_mode_of([made]) is not None:  # there are no values to compare
        return measured
    whole, _ = run_texts(module, args, kwargs, tokens, lambda packed: packed, plain=True)
    middle = tokens // 2
    first, before = run(0, middle)
    alone, _ = run(middle, tokens)
    several, _ = run(middle, tokens, states, before.values(states))
    most, before_last = run(0, tokens - 1)
    last, _ = run(tokens - 1, tokens, states, before_last.values(states))
    expected = _tensor(whole)
    effect = (expected[:, middle:] - _tensor(alone)).abs().max()
    rounding = 16 * torch.finfo(expected.dtype).eps * expected.abs().max()
    for what, got, of in (
        ("several tokens that go on from a state", _tensor(several), expected[:, middle:]),
        ("the next token after a state", _tensor(last), expected[:, -1:]),
        ("the first tokens of a text", _tensor(first), expected[:, :middle]),
        ("all but the last token", _tensor(most), expected[:, :-1]),
    ):
        if not (error := (got - of).abs().max()) <= _ALLOWED * effect + rounding:
            refuse(f"computes {what} otherwise than in one text: they differ by {error:.1e}")
    return measured


def _tensor(made: Any) -> Tensor:
    """The hidden states that a module returns."""
    found: Tensor = made[0] if isinstance(made, tuple) else made
    return found.float()


def _in_a_row(made: Any) -> Any:
    """``[tokens, 1, ...]`` to ``[1, tokens, ...]``."""
    if isinstance(made, tuple):
        return tuple(map(_in_a_row, made))
    return made.transpose(0, 1) if isinstance(made, Tensor) and made.ndim >= 2 else made
