"""Plans with classes of blocks under a variant's mask, which the layers of a kind share."""

from __future__ import annotations

from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.attention.variants import lookup
from prefixkit.models.steps.layer_pages import LayerPages
from prefixkit.models.variants.layer_scores import register_variant
from prefixkit.ops.attention_ops import plan_under_mask


def mask_of(layer: LayerPages) -> str:
    """Key of the variant whose masks hide KV from a layer's queries, whatever cap and sinks it has; made once."""
    if "masks" not in layer.keys:
        user = None if layer.kind.variant is None else layer.kind.variant.parts[0]
        layer.keys["masks"] = (register_variant(layer.kind.visible, None, False, None, user),)
    return layer.keys["masks"][0]


def masked_plan(
    step: Step, plan: list[Tensor], layer: LayerPages, known: dict[tuple[int, str], list[Tensor]]
) -> list[Tensor]:
    """A plan of a step with classes of its blocks (``classify_blocks``), made once for all layers of a kind.

    Decode steps go without where masks depend on positions alone: kernels then know which blocks are hidden from ranges
    of these, and classes would cost more than they save.  Under other masks, such as documents, a layer takes less time
    (``h200_variants.json``), for one launch a step, which a captured step repeats.

    Args:
        step, plan: The step, and its plan for these layers.
        layer: One of them.
        known: What was made in this step, by plan and mask.
    """
    at = layer.plan, mask_of(layer)
    variant = lookup(at[1])
    if not variant.mask_mods or (variant.hides_by_position and step.num_rows == len(step.logit_rows)):
        return plan
    if at not in known:
        page_size, kv_heads, head_dim = layer.pages[0].shape[1:]
        shape = [layer.kind.heads, kv_heads, head_dim, layer.pages[1].shape[3]]
        known[at] = plan_under_mask(plan, step.positions, shape, page_size, at[1])
    return known[at]
