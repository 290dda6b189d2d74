"""``classify_blocks`` by our kernel: one launch for each step and variant, whatever the tree."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefixkit.attention.queries import UNNUMBERED, UnnumberedSequences
from prefixkit.attention.variants import Variant, lookup
from prefixkit.backends.cuda.device_planner import PLAN_TENSORS, WORK_TENSORS
from prefixkit.backends.cuda.kernels import classify_unit, kernel_for
from prefixkit.backends.cuda.kv import describe
from prefixkit.backends.cuda.layouts import ATTENTION, Maps
from prefixkit.backends.cuda.variants.variant_words import words_on_device
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch
from prefixkit.ops.arguments import PACKED, BadShape
from prefixkit.ops.attention_ops import class_counts
from prefixkit.ops.attention_ops import classify_blocks as contract

_THREADS, _BLOCKS_PER_SM = 256, 8
_LAYOUT = ATTENTION[Maps.NONE]


def classify_blocks(
    q_positions: Tensor, plan: Sequence[Tensor], heads: Sequence[int], page_size: int, variant: str
) -> Tensor:
    """``classify_blocks``; its launch can be captured in a graph.

    Raises:
        BadShape, UnknownVariant, UnnumberedSequences: before anything is launched.
        CudaError: the launch failed.
    """
    classes, of, device = contract(q_positions, plan, heads, page_size, variant), lookup(variant), q_positions.device
    query_heads, kv_heads, head_dim, v_dim = heads
    function = _function(of, head_dim, query_heads // kv_heads, v_dim, device.index) if classes.numel() else None
    if function is None:
        return classes.new_empty((0, 0))
    words = words_on_device(of, device)
    words.refresh()
    items, counts = plan[1].shape[0] + plan[2].shape[0], class_counts(len(q_positions))
    behind = classes.view(-1)[items * classes.shape[1] :]
    behind[:counts].zero_()
    work, nodes = plan[:WORK_TENSORS], plan[WORK_TENSORS:PLAN_TENSORS]
    fields: dict[str, int] = dict.fromkeys((leaf.path for leaf in _LAYOUT.leaves), 0) | {
        "q_positions": q_positions.data_ptr(),
        "words": words.tensor.data_ptr(),
        "q_sequences": sequence_numbers(plan, len(q_positions)) if of.reads("b") else 0,
        "q_reach": reach_in(plan, len(q_positions)) if of.looks_ahead else 0,
        "block_classes": classes.data_ptr(),
        "class_words": classes.shape[1],
        "bits_capacity": len(behind) - counts,
        "rows": len(q_positions),
        "heads": query_heads,
        "kv_heads": kv_heads,
        "window": of.window or 0,
        "tile_capacity": work[1].shape[0],
        "decode_capacity": work[2].shape[0],
    }
    fields |= {name: tensor.data_ptr() for name, tensor in zip((*PACKED, *_NODES), (*work, *nodes), strict=True)}
    blocks = min(items, _BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count)
    launch(function, _LAYOUT, tuple(fields.values()), (blocks, 1, 1), _THREADS, 0, describe("classify_blocks", classes))
    return classes


_NODES = ("node_start", "node_length", "page_indptr", "pages", "first_slot")


_functions: WeakKeyDictionary[Variant, dict[tuple[int, ...], jit.Function | None]] = WeakKeyDictionary()


def _function(variant: Variant, *signature: int) -> jit.Function | None:
    """The kernel for a head size, GQA group, V's head size and device; None if plain torch computes attention."""
    known = _functions.setdefault(variant, {})
    if signature not in known:
        head_dim, gqa_group, v_dim, device = signature
        arch = jit.arch_of(device)
        kernel = kernel_for(arch, head_dim, gqa_group, v_dim)
        unit = None if kernel is None else classify_unit(kernel, head_dim, variant)
        known[signature] = None if unit is None else _LAYOUT.check(jit.load(unit, device)[unit.names[0]])
    return known[signature]


def classes_in(plan: Sequence[Tensor]) -> tuple[int, int]:
    """The address of a plan's classes of KV tiles, and the words of an item's row; 0 if it has no classes."""
    if len(plan) < PLAN_TENSORS + 2 or not plan[PLAN_TENSORS + 1].numel():
        return 0, 0
    classes, items = plan[PLAN_TENSORS + 1], plan[1].shape[0] + plan[2].shape[0]
    if classes.dtype != torch.int32 or classes.ndim != 2 or classes.shape[0] <= items or not classes.is_contiguous():
        raise BadShape(
            f"tree_attention: the plan's classes must be what classify_blocks returned for it, int32 of more than "
            f"{items} rows, got {list(classes.shape)} {classes.dtype}"
        )
    return classes.data_ptr(), classes.shape[1]


def reach_in(plan: Sequence[Tensor], rows: int) -> int:
    """The address of the last position that each query may see, under a variant that looks ahead; 0: all."""
    if len(plan) < PLAN_TENSORS + 3:
        return 0
    reach = plan[PLAN_TENSORS + 2]
    if reach.dtype != torch.int64 or reach.ndim != 1 or len(reach) < rows:
        raise BadShape(f"tree_attention: the plan says how far {list(reach.shape)} queries see, but q has {rows} rows")
    return reach.data_ptr()


def sequence_numbers(plan: Sequence[Tensor], rows: int) -> int:
    """The address of the queries' sequence numbers in a plan; UnnumberedSequences if it has none."""
    numbers = plan[PLAN_TENSORS] if len(plan) > PLAN_TENSORS else None
    if numbers is None or numbers.dtype != torch.int64 or numbers.ndim != 1 or len(numbers) < rows:
        raise UnnumberedSequences("tree_attention: " + UNNUMBERED)
    return numbers.data_ptr()
