"""The linear maps by which an attention module's ``expand_kv`` makes K and V from a latent and rotary keys.

K of head h is ``A_h [c; r]`` and V is ``D_h c``.  Both maps are measured: the module expands the basis vectors.  Mostly
the maps are rows of a weight, which is found by comparison, and ``expand_kv`` reads nothing else of the module.  Then
the place of these rows is cached, and each call views the weight as it is.  Else (adapters, quantised weights) no map
is cached: the module expands the basis again at each call, which takes as long as expanding ``latent + rotary`` tokens,
and no write to any weight can make the maps stale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prefixkit.models.weights.state import ModelState, state_of

EXPAND = "expand_kv"  # the method of an attention module that makes K and V from cached latents
_PLAIN = (nn.Parameter, Tensor)  # classes whose tensors do not consist of others


@dataclass(frozen=True, eq=False)
class LatentMaps:
    """The maps of one module, for one call of its attention.

    Attributes:
        key: ``[heads, made, latent]`` maps a latent to the elements of K at ``made``.
        value: ``[heads, v_dim, latent]`` maps a latent to V.
        made, copied: Indices of elements of K: computed ones, and at ``copied`` those that are the rotary keys.
        rotary: ``[heads, made, rotary]`` maps rotary keys to the elements at ``made``; None if they are copied.
        key_bias, value_bias: ``[heads, k_dim]`` and ``[heads, v_dim]`` constants added to K and V; None for none.
    """

    key: Tensor
    value: Tensor
    made: slice
    copied: slice
    rotary: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None

    def absorb(self, q: Tensor) -> Tensor:
        """``[rows, heads, k_dim]`` to ``[rows, heads, latent + rotary]``, whose product with ``[c; r]`` is q times K.

        The result is float32 on a CPU, as attention is, and elsewhere in q's dtype.
        """
        q = _computed(q)
        made = q[..., self.made].transpose(0, 1)
        of_latent = torch.bmm(made, _computed(self.key))
        of_rotary = q[..., self.copied].transpose(0, 1)
        if self.rotary is not None:
            of_rotary = torch.bmm(made, _computed(self.rotary))
        return torch.cat((of_latent, of_rotary), dim=2).transpose(0, 1)

    def values(self, out: Tensor) -> Tensor:
        """``[rows, heads, latent]`` means of latents to ``[rows, heads, v_dim]`` means of V, float32."""
        weight = _computed(self.value)
        made = torch.bmm(out.to(weight.dtype).transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).float()
        return made if self.value_bias is None else made + self.value_bias

    def shift(self, q: Tensor) -> Tensor | None:
        """``[rows, heads]`` float32 the constant that K's bias adds to all scores of a query, before scaling."""
        return None if self.key_bias is None else (q.float() * self.key_bias).sum(2)


def is_affine(module: nn.Module, latent: Tensor, rotary: Tensor) -> bool:
    """Whether some tokens show that ``expand_kv`` is affine in its arguments, and makes V from the latent alone.

    Args:
        latent, rotary: ``[1, heads, tokens, dim]`` its arguments, for three different tokens or more.
    """
    if latent.shape[1] != 1 or rotary.shape[1] != 1:
        return False
    c, r = (
        torch.cat((of[:, :, :2], of[:, :, :2].sum(2, keepdim=True), 0 * of[:, :, :1]), 2) for of in (latent, rotary)
    )
    k, v = _expanded(module, c, r)
    near = [_near(of[:, 0] + of[:, 1], of[:, 2] + of[:, 3], of.dtype) for of in (k, v)]
    return all(near) and torch.equal(_expanded(module, c, 0 * r)[1], v)


def maps_of(module: nn.Module, latent: int, rotary: int, kv: Tensor, tokens: Callable[[], int]) -> LatentMaps | None:
    """The maps of a module with its present weights; None if it has no maps, or they cost more than they save.

    Args:
        latent, rotary: Elements of the latent and of the rotary keys that the module caches per token.
        kv: A tensor with the dtype and device of the cached tensors.
        tokens: Returns how many tokens the module would expand without maps.
    """
    state = state_of(module)
    known = _known.get(module)
    if known is None or not known.is_of(state):
        known = _known[module] = _measured(module, state, latent, rotary, kv)
    if known.layout is None:
        return None
    if known.places is not None:
        key, value = (place.view(state, latent) for place in known.places)
        return LatentMaps(key, value, known.layout.made, known.layout.copied)
    return known.layout.maps(*_basis(module, latent, rotary, kv), rotary) if tokens() > latent + rotary else None


@dataclass(frozen=True)
class _Layout:
    """Which elements of K are computed from a latent, and which are copies of rotary keys."""

    made: slice
    copied: slice
    copies: bool

    def maps(self, k: Tensor, v: Tensor, rotary: int) -> LatentMaps:
        """The maps, read from a module's K and V of the basis vectors and of zeros."""
        latent = k.shape[1] - rotary - 1
        key = (k[:, :-1] - k[:, -1:]).transpose(1, 2)
        value = (v[:, :latent] - v[:, -1:]).transpose(1, 2)
        of_rotary = None if self.copies else key[:, self.made, latent:]
        biases = k[:, -1].float(), v[:, -1].float()
        return LatentMaps(key[:, self.made, :latent], value, self.made, self.copied, of_rotary, *biases)


@dataclass(frozen=True)
class _Place:
    """Rows of a module's weight, the same number per head; those of head ``h`` start at row ``first + h * step``."""

    module: int  # in ``ModelState.modules``
    name: str
    first: int
    step: int
    shape: tuple[int, int]  # heads, rows

    def weight(self, state: ModelState) -> Tensor:
        found = state.modules[self.module]._parameters[self.name]
        assert found is not None, "the modules are the same"
        return found

    def view(self, state: ModelState, latent: int) -> Tensor:
        """``[heads, rows, latent]``"""
        weight = self.weight(state)
        strides = weight.stride()
        begin = weight.storage_offset() + self.first * strides[0]
        return weight.detach().as_strided((*self.shape, latent), (self.step * strides[0], *strides), begin)


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of a module's maps; valid while its submodules are the same and run the same way.

    Attributes:
        modules, forwards: Those of the module's state.
        facts: How the modules run, and the tensors' dtypes, devices and shapes.
        layout: The layout of K; None: the module has no maps.
        places: The places of the maps for K and for V in the weights; None: they are rows of no weight.
    """

    modules: tuple[weakref.ref[Any], ...]
    forwards: tuple[weakref.ref[Any], ...]
    facts: list[Hashable]
    layout: _Layout | None
    places: tuple[_Place, _Place] | None

    def is_of(self, state: ModelState) -> bool:
        return (
            len(self.modules) == len(state.modules)
            and len(self.forwards) == len(state.forwards)
            and all(ref() is one for ref, one in zip(self.modules, state.modules, strict=True))
            and all(ref() is one for ref, one in zip(self.forwards, state.forwards, strict=True))
            and self.facts == _facts(state)
        )


class _Reads(TorchFunctionMode):
    """Records the tensors that are passed to torch's functions.

    Attributes:
        seen: Their ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        for one in given:  # the list grows while it is read
            if isinstance(one, Tensor):
                self.seen.add(id(one))
            elif isinstance(one, list | tuple):
                given += one
        return func(*args, **(kwargs or {}))


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def _facts(state: ModelState) -> list[Hashable]:
    return [*state.modes, *[(tensor.dtype, tensor.device, tensor.shape) for tensor in state.tensors]]


def _measured(module: nn.Module, state: ModelState, latent: int, rotary: int, kv: Tensor) -> _Known:
    with _Reads() as reads:
        k, v = _basis(module, latent, rotary, kv)
    layout = _layout(k, rotary)
    maps = layout.maps(k, v, rotary)
    # No random numbers are drawn: they would change samples of the model's own generate().
    numbers = torch.arange(8 * (latent + rotary), device=kv.device).square_().cos().view(1, 1, 8, -1).to(kv.dtype)
    c, r = numbers[..., :latent], numbers[..., latent:]
    fits = all(_near(*pair, kv.dtype) for pair in zip(_expanded(module, c, r), _applied(maps, c, r), strict=True))
    places = None
    if fits and layout.copies and not k[:, -1].any() and not v[:, -1].any():
        found = [next(_places(state, part), None) for part in (maps.key, maps.value)]
        weights = {id(place.weight(state)) for place in found if place is not None}
        # If another tensor is read, such as an adapter that is zero now, it may change the maps later.
        if None not in found and weights == reads.seen & set(map(id, [*state.tensors, *state.plain])):
            places = cast(tuple[_Place, _Place], tuple(found))
    modules, forwards = (tuple(map(weakref.ref, of)) for of in (state.modules, state.forwards))
    return _Known(modules, forwards, _facts(state), layout if fits else None, places)


def _basis(module: nn.Module, latent: int, rotary: int, kv: Tensor) -> tuple[Tensor, Tensor]:
    """K and V ``[heads, latent + rotary + 1, ...]`` that a module makes from the basis vectors and from zeros."""
    size = latent + rotary
    vectors = torch.eye(size + 1, size, dtype=kv.dtype, device=kv.device)[None, None]
    return _expanded(module, vectors[..., :latent], vectors[..., latent:])


def _expanded(module: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    k, v = getattr(module, EXPAND)(latent.contiguous(), rotary.contiguous())
    return k[0], v[0]


def _layout(k: Tensor, rotary: int) -> _Layout:
    """The layout of K, found from a module's K of the basis vectors and of zeros."""
    size, latent = k.shape[2], k.shape[1] - rotary - 1
    unit = torch.eye(rotary, dtype=k.dtype, device=k.device).expand(k.shape[0], -1, -1)
    for begin in (size - rotary, 0):
        copied = slice(begin, begin + rotary)
        made = slice(0, begin) if begin else slice(rotary, size)
        others = k[:, :latent, copied], k[:, -1, copied], k[:, latent:, made] - k[:, -1:, made]
        if torch.equal(k[:, latent:-1, copied], unit) and not any(bool(other.any()) for other in others):
            return _Layout(made, copied, copies=True)
    return _Layout(slice(0, size), slice(0, 0), copies=False)


def _applied(maps: LatentMaps, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a few tokens, computed by the maps."""
    c, r = latent[0].float(), rotary[0].float()
    k, v = (torch.matmul(c, weight.float().transpose(1, 2)) for weight in (maps.key, maps.value))
    if maps.rotary is not None:
        k = k + torch.matmul(r, maps.rotary.float().transpose(1, 2))
    elif maps.copied.start:
        k = torch.cat((k, r.expand(len(k), -1, -1)), dim=2)
    else:
        k = torch.cat((r.expand(len(k), -1, -1), k), dim=2)
    assert maps.key_bias is not None and maps.value_bias is not None, "of the basis"
    return k + maps.key_bias[:, None], v + maps.value_bias[:, None]


def _places(state: ModelState, part: Tensor) -> Iterator[_Place]:
    """Places where rows of a weight, the only parameter of its module, equal ``part [heads, rows, latent]``."""
    heads, rows, latent = part.shape
    for index, module in enumerate(state.modules):
        held = [(name, tensor) for name, tensor in module._parameters.items() if tensor is not None]
        if len(held) != 1 or type(held[0][1]) not in _PLAIN:
            continue
        ((name, weight),) = held
        fits = weight.ndim == 2 and weight.shape[1] == latent and len(weight) >= heads * rows
        if not fits or (weight.dtype, weight.device) != (part.dtype, part.device):
            continue
        each = len(weight) // heads
        for first, step in ((0, each), (each - rows, each), (0, rows), (len(weight) - heads * rows, rows)):
            place = _Place(index, name, first, step, (heads, rows))
            if torch.equal(place.view(state, latent), part):
                yield place


def _computed(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of products: float32 on a CPU."""
    return tensor.float() if tensor.device.type == "cpu" else tensor


def _near(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Equal except for rounding in a dtype."""
    error, size = (one.float() - other.float()).abs().max(), one.float().abs().max()
    return bool(error <= torch.finfo(dtype).eps ** 0.5 * size)
