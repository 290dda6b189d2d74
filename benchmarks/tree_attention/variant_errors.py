"""Root mean square errors of variants against float64: ours, FlexAttention's, and flash's where it has the variant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.runner import Row, failure
from benchmarks.tree_attention.variant_cases import Mods
from benchmarks.tree_attention.variant_inputs import Flex, Inputs, Ours, flex_anew
from prefixkit.attention.reference import reference_attention


def error_row(name: str, mods: Mods, inputs: Inputs) -> Row:
    """Root mean square errors of outputs and log-sum-exps: ours, FlexAttention's, flash's where it has the variant."""
    ours, queries = Ours(inputs, mods.variant(name)), inputs.queries
    where = inputs.snapshot, queries.row_node(), inputs.tree.positions
    numbers = inputs.q[0], inputs.k[0], inputs.v[0], inputs.heads.scale
    exact = reference_attention(*where, *numbers, ours.variant)
    expected = inputs.by_sequence(exact.out), inputs.by_sequence(exact.lse)
    out, lse = ours.first()
    found: dict[str, tuple[Tensor, Tensor]] = {"ours": (inputs.by_sequence(out), inputs.by_sequence(lse))}
    failed: Row = {}
    contenders: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"flex": partial(_flex, inputs, mods)}
    if name in ("noop", "causal") and inputs.device.type == "cuda":
        contenders["flash"] = partial(_flash, inputs, name == "causal")
    for who, attend in contenders.items():
        try:
            found[who] = attend()
        except Exception as error:
            failed[who] = failure(error)
    row: Row = {"failed": failed} if failed else {}
    for part, (key, best) in enumerate((("rmse", "over_best"), ("lse_rmse", "lse_over_best"))):
        each = {who: float((of[part].double() - expected[part]).square().mean().sqrt()) for who, of in found.items()}
        row[key] = {who: float(f"{rmse:.4g}") for who, rmse in each.items()}
        if others := [rmse for who, rmse in each.items() if who != "ours"]:
            row[best] = round(each["ours"] / min(others), 4)
    return row


def _flex(inputs: Inputs, mods: Mods) -> tuple[Tensor, Tensor]:
    flex_anew()
    flex = Flex(inputs)
    flex.use(mods)
    return flex.attend_with_lse()


def _flash(inputs: Inputs, is_causal: bool) -> tuple[Tensor, Tensor]:
    group, flash = inputs.heads.query // inputs.heads.kv, torch.ops.aten._scaled_dot_product_flash_attention
    q = inputs.by_sequence(inputs.q[0])
    k, v = (inputs.dense(pages[0]).repeat_interleave(group, 1) for pages in (inputs.k, inputs.v))
    out, lse = flash(q, k, v, 0.0, is_causal, False, scale=inputs.heads.scale)[:2]
    return out, lse[..., : q.shape[2]]
