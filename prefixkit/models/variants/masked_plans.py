"""Plans that classify their blocks under a variant's mask; the layers of a kind share them."""

from __future__ import annotations

from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.attention.variants import lookup
from prefixkit.models.steps.layer_pages import LayerPages
from prefixkit.models.variants.layer_scores import register_variant
from prefixkit.ops.attention_ops import plan_under_mask


def mask_of(layer: LayerPages) -> str:
    """Key of a variant with all masks that hide KV from a layer's queries, without cap and sinks; made once."""
    if "masks" not in layer.keys:
        user = None if layer.kind.variant is None else layer.kind.variant.parts[0]
        layer.keys["masks"] = (register_variant(layer.kind.visible, None, False, None, user),)
    return layer.keys["masks"][0]


def masked_plan(
    step: Step, plan: list[Tensor], layer: LayerPages, known: dict[tuple[int, str], list[Tensor]]
) -> list[Tensor]:
    """A plan of a step with classes of its blocks (``classify_blocks``), made once for all layers of a kind.

    Decode steps use no classes if masks depend on positions alone: kernels then find hidden blocks from ranges of
    positions, and classes would cost more than they save.  Under other masks, such as document masks, classes reduce a
    layer's time (``h200_variants.json``) for one launch per step, which a captured step replays.

    Args:
        step, plan: The step, and its plan for these layers.
        layer: One of these layers.
        known: The plans made in this step, by plan and mask.
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
