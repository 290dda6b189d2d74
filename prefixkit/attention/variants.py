"""Variants of attention: what happens to a score between ``q . k`` and the softmax, written once in Python.

The reference calls these functions, so do the CPU ops, and a kernel template can trace them: they must be elementwise
torch functions of their arguments and of what they capture, without data-dependent control flow.

Every function gets tensors that broadcast against scores of shape ``[..., heads, rows, len]``: ``q_position [..., rows,
1]`` and ``kv_position [..., 1, len]`` int64 positions in the sequence, ``head [heads, 1, 1]`` int64 query-head numbers.

    score_mod(score, q_position, kv_position, head) -> score      # score = scale * q . k, float32 or float64
    mask_mod(q_position, kv_position, head) -> bool               # True: visible, on top of causality
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import torch
from torch import Tensor

from prefixkit.attention.function_digest import fingerprint
from prefixkit.attention.visible import Visible

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Body:
    """The functions of a variant once more, in C++ for the GPU's kernels.

    Both are expressions of ``float score``, ``int q_position, kv_position, head`` (of the query) and the parameters,
    ``const float* p``: values are not compiled in, so layers that differ in them share a kernel.

    Attributes:
        score: The new score, or None.
        mask: Whether the key is visible, or None.
        parameters: ``[n]`` float32.
    """

    score: str | None
    mask: str | None
    parameters: Tensor


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant of causal attention.  Tensors that it captures must not change afterwards.

    Attributes:
        name: For people: logs, error messages, the readable half of its key.
        score_mod: Changes scores, or None.
        mask_mod: Hides keys, or None.
        window: A query at position ``p`` sees keys at positions in ``(p - window, p]`` only, so that no KV outside is
            read; ``mask_mod`` must hide it.  None for no limit.
        chunk: It sees keys from the multiple of ``chunk`` at or before ``p`` on; the same goes for the others.
        has_sinks: Whether the op takes a logit per head that joins the softmax's denominator, with no value behind it.
        bodies: ``score_mod`` and ``mask_mod`` in C++, in their order; None if there is no such text, and plain torch
            has to serve on a GPU too.

    Raises:
        ValueError: ``window`` or ``chunk`` below 1, or without a ``mask_mod``.
    """

    name: str
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    window: int | None = None
    has_sinks: bool = False
    bodies: tuple[Body, ...] | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("Variant: name must not be empty; logs and errors show it")
        if self.window is not None and (self.window < 1 or self.mask_mod is None):
            raise ValueError(
                f"Variant {self.name!r}: window must be at least 1 and come with the mask_mod that hides all outside, "
                f"got window={self.window} and mask_mod={self.mask_mod}; see sliding_window(size)"
            )
        if self.chunk is not None and (self.chunk < 1 or self.mask_mod is None):
            raise ValueError(
                f"Variant {self.name!r}: chunk must be at least 1 and come with the mask_mod that hides all before it, "
                f"got chunk={self.chunk} and mask_mod={self.mask_mod}; see chunked(size)"
            )

    @property
    def visible(self) -> Visible:
        """The range of keys outside which nothing is read."""
        return Visible(self.window, self.chunk)


CAUSAL = Variant("causal", bodies=())

_REGISTRY: dict[str, Variant] = {CAUSAL.name: CAUSAL}


class UnknownVariant(ValueError):
    """An op was given a key that no variant is registered under."""


def register(variant: Variant) -> str:
    """Make a variant known to the ops, whose schemas know strings but no Python functions, for good.

    Returns:
        Its key: the name, and a digest of its functions with all they capture, of its window, chunk, sinks and bodies.
        Registering it again, or another variant made with the same parameters, returns the same key, in this process
        or another.

    Raises:
        TypeError: one of its functions captures something that has no content to go by.
    """
    key = variant.name
    if not _is_causal(variant):
        bodies = None if variant.bodies is None else tuple((b.score, b.mask, b.parameters) for b in variant.bodies)
        sight = variant.window, variant.chunk
        key += "#" + fingerprint(variant.score_mod, variant.mask_mod, *sight, variant.has_sinks, bodies)
    _REGISTRY.setdefault(key, variant)
    return key


def lookup(key: str) -> Variant:
    """The variant registered under a key, or UnknownVariant."""
    variant = _REGISTRY.get(key)
    if variant is None:
        known = ", ".join(sorted(_REGISTRY))
        raise UnknownVariant(
            f"no variant is registered as {key!r}; pass the key that register(variant) returned ({known})"
        )
    return variant


def sliding_window(size: int) -> Variant:
    """Each query sees the last ``size`` tokens of its sequence, itself included; ValueError unless it is 1 or more."""
    _check_size("sliding_window", size)

    def mask_mod(q_position: Tensor, kv_position: Tensor, head: Tensor) -> Tensor:
        return q_position - kv_position < size

    body = Body(None, "q_position - kv_position < __float_as_int(p[0])", _bits(size))
    return Variant(f"sliding_window({size})", mask_mod=mask_mod, window=size, bodies=(body,))


def chunked(size: int) -> Variant:
    """Each query sees its own chunk of ``size`` tokens only, up to itself; chunks begin at multiples of ``size``.

    ValueError unless ``size`` is 1 or more.
    """
    _check_size("chunked", size)

    def mask_mod(q_position: Tensor, kv_position: Tensor, head: Tensor) -> Tensor:
        return q_position // size == kv_position // size

    body = Body(None, "q_position / __float_as_int(p[0]) == kv_position / __float_as_int(p[0])", _bits(size))
    return Variant(f"chunked({size})", mask_mod=mask_mod, bodies=(body,), chunk=size)


def _check_size(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}: size must be an integer of at least 1 token, got {size!r}")


def _bits(size: int) -> Tensor:
    """A number of tokens as a parameter, which are float32."""
    return torch.tensor([min(size, 2**31 - 1)], dtype=torch.int32, device="cpu").view(torch.float32)


def soft_cap(cap: float) -> Variant:
    """Scores bounded smoothly: ``cap * tanh(score / cap)`` (Gemma 2); ValueError unless ``cap`` is finite, above 0."""
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < math.inf:
        raise ValueError(f"soft_cap: cap must be a finite number above 0, got {cap!r}")
    bound = float(cap)

    def score_mod(score: Tensor, q_position: Tensor, kv_position: Tensor, head: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    body = Body("p[0] * tanhf(score / p[0])", None, torch.tensor([bound], dtype=torch.float32, device="cpu"))
    return Variant(f"soft_cap({bound:g})", score_mod=score_mod, bodies=(body,))


def alibi(slopes: Tensor | Sequence[float]) -> Variant:
    """Attention with linear biases: each head subtracts ``slope * distance`` (Press et al. 2022).

    ``slopes [heads]``: one for each query head; ValueError unless they are one row of finite numbers.
    """
    # A copy: the caller's tensor may change, a registered variant must not.
    per_head = torch.as_tensor(slopes).detach().to(torch.float32, copy=True)
    if per_head.ndim != 1 or not len(per_head) or not bool(torch.isfinite(per_head).all()):
        raise ValueError(f"alibi: slopes must be finite numbers of shape [heads], got {slopes!r}")

    def score_mod(score: Tensor, q_position: Tensor, kv_position: Tensor, head: Tensor) -> Tensor:
        return score + per_head.to(score.device)[head] * (kv_position - q_position)

    body = Body("score + p[head] * float(kv_position - q_position)", None, per_head)
    return Variant(f"alibi({len(per_head)} heads)", score_mod=score_mod, bodies=(body,))


def attention_sinks() -> Variant:
    """One learned logit per head joins the softmax's denominator, so that a head can attend to nothing (GPT-OSS).

    The logits are an argument of the op, ``sinks``.
    """
    return Variant("attention_sinks", has_sinks=True, bodies=())


def compose(*variants: Variant) -> Variant:
    """One variant that does what all do: score_mods in the order given, a key visible only if every mask shows it.

    The op takes one row of sinks, which join once, however many of the parts have sinks.
    """
    parts = [variant for variant in variants if not _is_causal(variant)]
    if not parts:
        return CAUSAL
    if len(parts) == 1:
        return parts[0]
    bodies = [part.bodies for part in parts if part.bodies is not None]
    score_mods = [part.score_mod for part in parts if part.score_mod is not None]
    mask_mods = [part.mask_mod for part in parts if part.mask_mod is not None]

    def score_mod(score: Tensor, q_position: Tensor, kv_position: Tensor, head: Tensor) -> Tensor:
        for mod in score_mods:
            score = mod(score, q_position, kv_position, head)
        return score

    def mask_mod(q_position: Tensor, kv_position: Tensor, head: Tensor) -> Tensor:
        return reduce(operator.and_, (mod(q_position, kv_position, head) for mod in mask_mods))

    return Variant(
        name=" + ".join(part.name for part in parts),
        score_mod=score_mod if score_mods else None,
        mask_mod=mask_mod if mask_mods else None,
        window=min((part.window for part in parts if part.window is not None), default=None),
        has_sinks=any(part.has_sinks for part in parts),
        bodies=tuple(chain(*bodies)) if len(bodies) == len(parts) else None,
        # Chunks of several sizes hide more than the smallest does; what is read may be more than what is seen.
        chunk=min((part.chunk for part in parts if part.chunk is not None), default=None),
    )


def _is_causal(variant: Variant) -> bool:
    """Whether a variant is plain causal attention under another object."""
    changes = variant.score_mod or variant.mask_mod or variant.has_sinks or variant.bodies
    return variant.name == CAUSAL.name and not changes
