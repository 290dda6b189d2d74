"""Replacements by ops for transformers' functions of Mamba 2 and gated delta nets, for states that stay in a pool.

Each replacement takes the arguments of transformers' function, with a :class:`PoolState` as the state; if the op does
not support the other arguments, transformers' function runs on a copy of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.kv.state_pool import StateTensor
from prefixkit.ops.arguments import FLOATS

Function = Callable[..., Any]
CONVOLUTION, RECURRENCE = "causal_conv1d_update", "mamba2_selective_state_update"
DELTA_TOKEN, DELTA_TOKENS = "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"


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

    def copy(self) -> Tensor:
        """The states before the tokens, ``[B, *shape]``."""
        return self.tensor.index_select(0, self.source)

    def store(self, states: Tensor) -> None:
        """Store ``[B, *shape]`` states after the tokens."""
        self.tensor.index_copy_(0, self.target.clamp(min=0), states)  # slot 0 holds no state

    def copy_(self, states: PoolState) -> None:
        """Accept the states after the tokens, as a cache does from a module: they are in their slots."""
        assert states is self, "what a function that updates these in their pool has returned"

    def by_copy(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``function``, which writes states in place, on a copy of these; store the copy, and return the result."""
        copy = self.copy()
        made = function(*(copy if of is self else of for of in args), **kwargs)
        self.store(copy)
        return made


@dataclass(frozen=True)
class FusedOp:
    """An op that replaces a function.

    Attributes:
        takes: Whether the op can update a state of a module in its pool.
        most_tokens: The most tokens of a row for which the op runs, by device type: where it is faster.
        over_kernels: Whether the op runs even where a kernel is installed.
        replacement: Makes the replacement from transformers' function.
        calls: Calls for :func:`differs`: a pool of states, and the other arguments.
    """

    takes: Callable[[StateTensor], bool]
    replacement: Callable[[Function], Function]
    calls: Callable[[Callable[..., Tensor]], list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]]
    most_tokens: Mapping[str, int] = field(default_factory=dict)
    over_kernels: bool = False

    def runs(self, tokens: int, device: torch.device) -> bool:
        """Whether the op runs a number of tokens of each row."""
        return tokens <= self.most_tokens.get(device.type, 1)


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


def _delta_rule(theirs: Function) -> Function:
    def gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        state, others = initial_state, {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **kwargs}
        given = {"g": g, "beta": beta, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens, **others}
        if not isinstance(state, PoolState):
            return theirs(query, key, value, initial_state=state, **given)
        alike = query.dtype == key.dtype == value.dtype and all(of.dtype in FLOATS for of in (value, beta))
        if not alike or g.dtype != torch.float32 or cu_seqlens is not None or kwargs.get("scale") is not None:
            out, after = theirs(query, key, value, initial_state=state.copy(), **given)
            state.store(after)
        else:
            places = state.tensor, state.source, state.target
            out = torch.ops.prefixkit.delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel, *places)
        return out, state

    return gated_delta_rule


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


def _calls_of_delta_rule(
    random: Callable[..., Tensor],
) -> list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]:
    query, key, value = random(2, 3, 4, 6), random(2, 3, 4, 6), random(2, 3, 4, 5)
    gates = {"g": -random(2, 3, 4).exp(), "beta": random(2, 3, 4).sigmoid()}
    others = {"initial_state": PoolState, "output_final_state": True}
    return [
        (random(4, 4, 6, 5), (query, key, value), {**gates, **others, "use_qk_l2norm_in_kernel": normalize})
        for normalize in (True, False)
    ]


_DELTA = FusedOp(
    lambda state: state.recurrent and not state.index and state.dtype == torch.float32 and len(state.shape) == 3,
    _delta_rule,
    _calls_of_delta_rule,
    most_tokens={"cpu": 32, "cuda": 64},  # torch's code pads fewer tokens to a chunk of 64
    over_kernels=True,
)
FUSED_OPS = {
    CONVOLUTION: FusedOp(lambda state: not state.recurrent and not state.index, _convolution, _calls_of_convolution),
    RECURRENCE: FusedOp(
        lambda state: state.recurrent and not state.index and state.dtype == torch.float32,
        _recurrence,
        _calls_of_recurrence,
    ),
    DELTA_TOKEN: _DELTA,
    DELTA_TOKENS: _DELTA,
}


def differs(name: str, torchs: Function) -> str:
    """How transformers' torch code of a function and the op differ on a few random inputs; "" if they do not."""
    generator = torch.Generator("cpu").manual_seed(0)
    source, target = torch.tensor([[2, 1], [2, 3]], device="cpu")

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    ours = FUSED_OPS[name].replacement(_refused)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for pool, args, kwargs in FUSED_OPS[name].calls(random):
            held = pool.clone()
            state, copy = PoolState(held, source, target), pool[source]
            try:
                wanted = torchs(*_with(copy, args), **_with(copy, kwargs))
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                return f"takes other arguments than it did: {error}"
            got = ours(*_with(state, args), **_with(state, kwargs))
            if isinstance(wanted, tuple):  # the states after the tokens, in place of writing them
                (wanted, copy), (got, _) = wanted, got
            for what, mine, theirs in (("returns", got, wanted), ("keeps", held[target], copy)):
                if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
                    return f"{what} other numbers than the op"
    return ""


def _with(state: Any, given: Any) -> Any:
    """The arguments of a call with a state in place of ``PoolState``."""
    if isinstance(given, dict):
        return dict(zip(given, _with(state, given.values()), strict=True))
    return [state if of is PoolState else of for of in given]


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("calls for a comparison are what the op computes")
