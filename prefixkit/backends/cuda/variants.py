"""Variants for the kernels: a header that says what is done to a score, and the numbers that it is done with."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefixkit.attention.variants import Variant, lookup
from prefixkit.ops.checks import BadShape

HEADER = "variant_body.cuh"
_ARGUMENTS = "int q_position, int kv_position, int head, const float* parameters"


def header(variant: Variant) -> str | None:
    """The text of ``struct Variant`` for a variant; None for plain causal attention, which the template has itself.

    Variants of the same kinds in the same order, whatever their numbers, give the same text.
    """
    assert variant.bodies is not None, f"{variant.name} has no C++"
    if not variant.bodies and variant.sinks is None:
        return None
    scores, masks, offset = [], [], 0
    for body in variant.bodies:
        at = f"const float* p = parameters + {offset};"
        if body.score is not None:
            scores.append(f"        {{ {at} score = {body.score}; }}\n")
        if body.mask is not None:
            masks.append(f"        {{ {at} if (!({body.mask})) return false; }}\n")
        offset += len(body.parameters)

    def flag(there: object) -> str:
        return "true" if there else "false"

    return f"""#pragma once
namespace prefixkit {{
struct Variant {{
    static constexpr bool HAS_SCORE = {flag(scores)}, HAS_MASK = {flag(masks)};
    static constexpr bool HAS_SINK = {flag(variant.sinks is not None)};
    static DEVICE float score(float score, {_ARGUMENTS}) {{
{"".join(scores)}        return score;
    }}
    static DEVICE bool mask({_ARGUMENTS}) {{
{"".join(masks)}        return true;
    }}
    static DEVICE float sink(int head, const float* parameters) {{ return parameters[{offset} + head]; }}
}};
}}  // namespace prefixkit
"""


def parameters(variant: Variant, heads: int, device: torch.device) -> Tensor:
    """``[n]`` float32: the parameters of the bodies one after the other, then the sinks.

    Raises:
        BadShape: numbers per head, for another number of heads.
    """
    parts = [body.parameters for body in variant.bodies or ()]
    per_head = [body for body in variant.bodies or () if "p[head]" in f"{body.score} {body.mask}"]
    for values, what in [(body.parameters, "slopes") for body in per_head] + [(variant.sinks, "sinks")]:
        if values is not None and len(values) != heads:
            raise BadShape(f"tree_attention: variant {variant.name!r} has {len(values)} {what} for {heads} heads")
    if variant.sinks is not None:
        parts.append(variant.sinks.to(torch.float32))
    return (
        torch.cat([part.to(device) for part in parts]) if parts else torch.zeros(1, dtype=torch.float32, device=device)
    )


# They live as long as their variant: captured graphs hold their addresses.
_on_device: WeakKeyDictionary[Variant, dict[tuple[int, torch.device], Tensor]] = WeakKeyDictionary()


def on_device(key: str, heads: int, device: torch.device) -> Tensor:
    """:func:`parameters` of a registered variant, made once; they stay where they are as long as the variant does."""
    variant = lookup(key)
    made = _on_device.setdefault(variant, {})
    if (heads, device) not in made:
        made[heads, device] = parameters(variant, heads, device)
    return made[heads, device]
