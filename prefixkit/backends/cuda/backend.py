"""The CUDA backend: what our kernels offer."""

from __future__ import annotations

from prefixkit.backends.cuda.attention import tree_attention
from prefixkit.backends.cuda.kv import advance, kv_append, rotary_append
from prefixkit.backends.cuda.plan_launch import plan_tree
from prefixkit.backends.cuda.planner import graph_planning, planner_for
from prefixkit.backends.cuda.sampling import sample
from prefixkit.ops.backend import Backend

BACKEND = Backend(
    "cuda", planner_for, kv_append, rotary_append, tree_attention, advance, sample, plan_tree, graph_planning
)
