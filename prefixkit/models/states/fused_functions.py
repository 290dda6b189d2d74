"""Replacements by ops for transformers' functions for one token of Mamba 2, for states that are stored in a pool.

Each replacement takes the arguments of transformers' function, with a :class:`PoolState` as the state; if the op does
not support the other arguments, transformers' function runs on a copy of the states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.kv.state_pool import StateTensor
from prefixkit.ops.arguments import FLOATS

Function = Callable[..., Any]
CONVOLUTION, RECURRENCE = "causal_conv1d_update", "mamba2_selective_state_update"


@dataclass(frozen=True, eq=False)
class PoolState:
    """The states of some sequences in a pool, passed in place of a tensor ``[B, *shape]``.

    Attributes:
        tensor: ``[1 + slots, *shape]``.
        source, target: ``[B]`` int64 slots before and after the token; see ``ops.state_ops``.
    """

    tensor: Tensor
    source: Tensor
    target: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.source.shape[0], *self.tensor.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def by_copy(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``function``, which writes states in place, on a copy of these; store the copy, and return the result."""
        copy = self.tensor.index_select(0, self.source)
        made = function(*(copy if of is self else of for of in args), **kwargs)
        self.tensor.index_copy_(0, self.target.clamp(min=0), copy)  # slot 0 holds no state
        return made


@dataclass(frozen=True)
class Made:
    """An op that replaces a function.

    Attributes:
        takes: Whether the op can update a state of a module in its pool.
        instead: Makes the replacement from transformers' function.
        calls: Calls for :func:`differs`: a pool of states, and the other arguments.
    """

    takes: Callable[[StateTensor], bool]
    instead: Callable[[Function], Function]
    calls: Callable[[Callable[..., Tensor]], list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]]


def _convolution(theirs: Function) -> Function:
    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Any,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(conv_state, PoolState):
            return theirs(hidden_states, conv_state, weight, bias, activation, **kwargs)
        dtype = hidden_states.dtype
        exact = dtype in FLOATS and dtype in (weight.dtype, torch.float32)  # weights convert to it exactly
        known = activation in (None, "silu", "swish") and hidden_states.shape[-1] == 1
        if not exact or not known or conv_state.dtype != dtype or conv_state.shape[1:] != weight.shape:
            return conv_state.by_copy(theirs, hidden_states, conv_state, weight, bias, activation, **kwargs)
        weight, bias = weight.to(dtype).contiguous(), None if bias is None else bias.to(dtype)
        slots = conv_state.source, conv_state.target
        silu = activation is not None
        made = torch.ops.prefixkit.conv_step(hidden_states[..., 0], weight, bias, conv_state.tensor, *slots, silu)
        return made[..., None]

    return causal_conv1d_update


def _recurrence(theirs: Function) -> Function:
    def mamba2_selective_state_update(
        state: Any,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # as transformers names it, here and below
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        others = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z, **kwargs}
        if not isinstance(state, PoolState):
            return theirs(state, hidden_states, dt, A, B, C, D, **others)
        of_heads = (dt, 2), (A, 1), (D, 1), (dt_bias, 1)
        alike = all(of is None or of.dtype == hidden_states.dtype for of in (B, C, z))
        known = all(of is None or of.dtype in FLOATS for of in (hidden_states, dt, D, dt_bias))
        if not (dt_softplus and alike and known and all(_of_heads(of, axis) for of, axis in of_heads)):
            return state.by_copy(theirs, state, hidden_states, dt, A, B, C, D, **others)
        skip, bias = (None if of is None else of[:, 0] for of in (D, dt_bias))
        given = hidden_states, dt[:, :, 0], A[:, 0, 0].float(), B, C, skip, bias, z
        return torch.ops.prefixkit.mamba2_step(*given, state.tensor, state.source, state.target)

    return mamba2_selective_state_update


def _of_heads(tensor: Tensor | None, axis: int) -> bool:
    """Whether a tensor has one number per head, repeated along all axes from ``axis`` on."""
    if tensor is None:
        return True
    return all(
        size == 1 or not stride for size, stride in zip(tensor.shape[axis:], tensor.stride()[axis:], strict=True)
    )


def _calls_of_convolution(
    random: Callable[..., Tensor],
) -> list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]:
    weight, inputs = random(6, 4), random(2, 6, 1)
    return [
        (random(4, 6, 4), (inputs, PoolState, weight, random(6)), {"activation": "silu"}),
        (random(4, 6, 4), (inputs, PoolState, weight), {}),
    ]


def _calls_of_recurrence(
    random: Callable[..., Tensor],
) -> list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]:
    heads, dim, size = 4, 3, 5
    dt, rate = (4 * random(2, heads))[..., None].expand(-1, -1, dim), -random(heads).exp()[:, None, None]
    skip, bias = (random(heads)[:, None].expand(-1, dim) for _ in range(2))
    given = random(2, heads, dim), dt, rate.expand(-1, dim, size), random(2, 2, size), random(2, 2, size)
    others = {"dt_bias": bias, "dt_softplus": True}
    return [
        (random(4, heads, dim, size), (PoolState, *given, skip), {**others, "z": None}),
        (random(4, heads, dim, size), (PoolState, *given, skip), {**others, "z": random(2, heads, dim)}),
    ]


MADE = {
    CONVOLUTION: Made(lambda state: not state.recurrent and not state.index, _convolution, _calls_of_convolution),
    RECURRENCE: Made(
        lambda state: state.recurrent and not state.index and state.dtype == torch.float32,
        _recurrence,
        _calls_of_recurrence,
    ),
}


def differs(name: str, torchs: Function) -> str:
    """How transformers' torch code of a function and the op differ on a few random inputs; "" if they do not."""
    generator = torch.Generator("cpu").manual_seed(0)
    source, target = torch.tensor([[2, 1], [2, 3]], device="cpu")

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    ours = MADE[name].instead(_refused)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for pool, args, kwargs in MADE[name].calls(random):
            held = pool.clone()
            state, copy = PoolState(held, source, target), pool[source]
            try:
                wanted = torchs(*(copy if of is PoolState else of for of in args), **kwargs)
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                return f"takes other arguments than it did: {error}"
            got = ours(*(state if of is PoolState else of for of in args), **kwargs)
            for what, mine, theirs in (("returns", got, wanted), ("keeps", held[target], copy)):
                if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
                    return f"{what} other numbers than the op"
    return ""


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("calls for a comparison are what the op computes")
