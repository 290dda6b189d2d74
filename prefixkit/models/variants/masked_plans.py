"""Plans with classes of blocks under a variant's mask, which the layers of a kind share."""

from __future__ import annotations

from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.models.steps.layer_pages import LayerPages
from prefixkit.ops.attention_ops import plan_under_mask


def masked_plan(
    step: Step,
    plan: list[Tensor],
    layer: LayerPages,
    variant: str,
    heads: int,
    known: dict[tuple[int, str], list[Tensor]],
) -> list[Tensor]:
    """A plan of a step with classes of its blocks (``classify_blocks``), made once for all layers of a kind.

    Decode steps go without.  Of windows the kernels read no more in any case; under masks that ranges of positions do
    not decide, such as documents, a layer would take less time (``h200_variants.json``), for one launch more a step.

    Args:
        step, plan: The step, and its plan for these layers.
        layer: One of them.
        variant: Key of the variant, which has a mask.
        heads: Query heads.
        known: What was made in this step, by plan and variant.
    """
    if step.num_rows == len(step.logit_rows):
        return plan
    at = layer.plan, variant
    if at not in known:
        page_size, kv_heads, head_dim = layer.pages[0].shape[1:]
        shape = [heads, kv_heads, head_dim, layer.pages[1].shape[3]]
        known[at] = plan_under_mask(plan, step.positions, shape, page_size, variant)
    return known[at]
