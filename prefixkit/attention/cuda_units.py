"""Every unit of CUDA source that is compiled: for the ops, for compiling ahead, and for continuous integration."""

from __future__ import annotations

from itertools import product

from prefixkit.attention import cuda_variants
from prefixkit.attention.nvrtc import Unit
from prefixkit.attention.variants import (
    CAUSAL,
    Variant,
    alibi,
    attention_sinks,
    compose,
    sliding_window,
    soft_cap,
)

WIDTHS = (16, 8, 4, 2)
APPEND = Unit(
    "append_copy.cu", tuple(f"prefixkit::kv_{way}<{width}>" for way in ("append", "gather") for width in WIDTHS)
)
MERGE = Unit("merge_states.cu", ("prefixkit::merge_states<1>", "prefixkit::merge_states<4>"))
PLAN = Unit("plan_tree.cu", ("prefixkit::plan_tree",))

ATTENTION = "prefixkit::tree_attention"
# The source for each target, and the head sizes that it serves.
ATTENTION_SOURCES = {"sm_90a": "tree_attention_sm90.cu"}
HEAD_DIMS = {"sm_90a": (64, 128)}


def attention_unit(arch: str, head_dim: int, half: bool, variant: Variant) -> Unit:
    """Tree attention for one head size, float16 or bfloat16, and the kinds of one variant."""
    defines = (("PREFIXKIT_HEAD_DIM", str(head_dim)), ("PREFIXKIT_HALF", str(int(half))))
    text = cuda_variants.header(variant)
    if text is None:
        return Unit(ATTENTION_SOURCES[arch], (ATTENTION,), defines)
    name = cuda_variants.HEADER
    return Unit(ATTENTION_SOURCES[arch], (ATTENTION,), (*defines, ("PREFIXKIT_VARIANT", f'"{name}"')), ((name, text),))


def units(arch: str) -> tuple[Unit, ...]:
    """What continuous integration compiles for a target: every head size and dtype plain, and once with every variant."""
    heads = HEAD_DIMS.get(arch, ())
    plain = [attention_unit(arch, head_dim, half, CAUSAL) for head_dim, half in product(heads, (False, True))]
    slopes = [1.0, 0.5]
    every = compose(sliding_window(128), soft_cap(30.0), alibi(slopes), attention_sinks(slopes))
    varied = [attention_unit(arch, head_dim, False, variant) for head_dim in heads[-1:] for variant in (every,)]
    return APPEND, MERGE, PLAN, *plain, *varied
