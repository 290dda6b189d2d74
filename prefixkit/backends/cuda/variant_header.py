"""Variants for the kernels: a header that says what is done to a score, and the numbers that it is done with."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixkit.attention.variants import Variant, lookup
from prefixkit.ops.arguments import BadShape
from prefixkit.threads import once

HEADER = "variant_body.cuh"
_ARGUMENTS = "int q_position, int kv_position, int head, const float* parameters"


def header(variant: Variant) -> str | None:
    """The text of ``struct Variant`` for a variant; None for plain causal attention, which the template has itself.

    Variants of the same kinds in the same order, whatever their numbers, give the same text.
    """
    assert variant.bodies is not None, f"{variant.name} has no C++"
    if not variant.bodies and not variant.has_sinks:
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
    static constexpr bool HAS_SINK = {flag(variant.has_sinks)};
    static DEVICE float score(float score, {_ARGUMENTS}) {{
{"".join(scores)}        return score;
    }}
    static DEVICE bool mask({_ARGUMENTS}) {{
{"".join(masks)}        return true;
    }}
}};
}}  // namespace prefixkit
"""


def parameters(variant: Variant, heads: int, device: torch.device) -> Tensor:
    """``[n]`` float32: the parameters of the bodies one after the other.

    Raises:
        BadShape: numbers per head, for another number of heads.
    """
    bodies = variant.bodies or ()
    for body in bodies:
        if "p[head]" in f"{body.score} {body.mask}" and (count := len(body.parameters)) != heads:
            raise BadShape(f"tree_attention: variant {variant.name!r} has {count} slopes for {heads} heads")
    if not bodies:
        return torch.zeros(1, dtype=torch.float32, device=device)
    return torch.cat([body.parameters.to(device) for body in bodies])


@once
def on_device(key: str, heads: int, device: torch.device) -> Tensor:
    """:func:`parameters` of a registered variant, made once; they stay where they are: captured graphs read them."""
    return parameters(lookup(key), heads, device)
