"""``tree_attention`` in plain torch: running a program, the only part that each layer of a model waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.variants import Variant, lookup
from prefixkit.backends.torch.host_planner import BoundPlan, find_plan
from prefixkit.backends.torch.plain_scores import NOTHING, Own, scored_attention
from prefixkit.backends.torch.program.attention_calls import Call, biased_mask, hidden_rows
from prefixkit.backends.torch.program.layer_program import Program
from prefixkit.backends.torch.program.merge import pick, run_merge
from prefixkit.backends.torch.read_keys import Expand, Read, check_layout, check_layouts, expand_keys, read_kv
from prefixkit.backends.torch.tuning import Heads
from prefixkit.ops.arguments import BadShape, capturing, check_attention, check_bias, check_expanded, check_selected
from prefixkit.ops.backend import NotCapturable
from prefixkit.ops.partial_states import State

# It returns the natural log-sum-exp of the softmax with the output, reads strided keys, and shares KV heads among query
# heads.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def tree_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_positions: Tensor,
    plan: Sequence[Tensor] | BoundPlan,
    scale: float,
    variant: str,
    sinks: Tensor | None = None,
    rotary_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``tree_attention``; ``plan`` is a ``BoundPlan``, or ends with the handle of one (see ``host_planner``)."""
    check_attention(q, k_pages, v_pages, q_positions, lookup(variant), sinks, rotary_pages)
    if rotary_pages is not None:
        k_pages = torch.cat((k_pages, rotary_pages.expand(-1, -1, k_pages.shape[2], -1)), dim=3)
    bound, v_dim = bound_plan("tree_attention", plan, q), v_pages.shape[3]
    program = bound.program(k_pages.shape, q.shape[1], q.dtype, q.device, variant, v_dim)
    return run_program(program, q, k_pages, v_pages, scale, lookup(variant), sinks)


def expanded_attention(
    q: Tensor,
    cached: Sequence[Tensor],
    expand: Expand | None,
    q_positions: Tensor,
    plan: Sequence[Tensor] | BoundPlan,
    scale: float,
    variant: str,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over K and V that are computed from the cached tensors, such as latents.

    Each query may see selected tokens only, and may add a bias to its scores.  ``expand`` is called for each kernel
    call, on the tokens that the call reads: so a shared node is expanded once a step, and the K and V of one call at
    most are in memory.

    Args:
        q: ``[T, heads, k_dim]`` in the pages' dtype.
        cached: ``[pages, page_size, heads_i, dim_i]`` each, pages as the pool holds them.
        expand: Computes K ``[1, kv_heads, n, k_dim]`` and V ``[1, kv_heads, n, v_dim]`` of n tokens from their cached
            tensors ``[1, heads_i, n, dim_i]``.  None: ``cached`` are the pages of K and V.
        q_positions, scale, variant, sinks: As ``tree_attention`` takes them.
        plan: ``Step.plan`` of a planner for plain torch, made for the heads of K and V that ``expand`` returns.
        selected: ``[T, positions]`` bool: which positions of its sequence a query sees, among those that it would see
            otherwise; None for all.
        bias: ``[T, heads, positions]`` floats: added to the scaled score of each query at each position of its
            sequence; None for no bias.

    Returns:
        As ``tree_attention``: ``out [T, heads, v_dim]`` and ``lse [T, heads]``.

    Raises:
        BadShape, BadDtype, BadDevice: the arguments, or what ``expand`` returns, do not fit each other or the plan.
        NoSuchPlan, UnknownVariant, NotCapturable: as ``tree_attention``.
    """
    found = expanded_state(q, cached, expand, q_positions, plan, scale, variant, sinks, selected, bias)
    return found.out.to(q.dtype), found.lse


@torch.no_grad()
def expanded_state(
    q: Tensor,
    cached: Sequence[Tensor],
    expand: Expand | None,
    q_positions: Tensor,
    plan: Sequence[Tensor] | BoundPlan,
    scale: float,
    variant: str,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
    bias: Tensor | None = None,
    shape: HeadShape | None = None,
) -> State:
    """The same, with output in float32; ``shape``: the heads of K and V, if the plan was made for other heads."""
    op, modifier = "expanded_attention", lookup(variant)
    check_expanded(q, cached, q_positions, modifier, sinks)
    bound = bound_plan(op, plan, q)
    shape = bound.shape if shape is None else shape
    if shape is None or q.shape[1:] != (shape.heads, shape.head_dim):
        planned = "no heads" if shape is None else f"{shape.heads} heads of {shape.head_dim}"
        raise BadShape(f"{op}: q has {q.shape[1]} heads of {q.shape[2]}, but the plan was made for {planned}")
    pool = (*cached[0].shape[:2], shape.kv_heads, shape.head_dim)
    if selected is not None:
        check_selected(op, selected, q)
    if bias is not None:
        check_bias(op, bias, q)
    own = Own(selected, bias)
    kinds = {"expanded": expand is not None, "scored": own.scored}
    program = bound.program(pool, shape.heads, q.dtype, q.device, variant, shape.value_dim, **kinds)
    if program.on_cpu:
        check_layouts(op, cached)

    def read(call: Call) -> tuple[Tensor, Tensor]:
        if expand is None:
            return read_kv(call, cached[0], cached[1], q.dtype, on_cpu=program.on_cpu)
        return expand_keys(call, cached, expand, program.heads, on_cpu=program.on_cpu)

    return run_reading(program, q, read, scale, modifier, sinks, own)


def bound_plan(op: str, plan: Sequence[Tensor] | BoundPlan, q: Tensor) -> BoundPlan:
    """The plan, which must be one of these queries."""
    if capturing(q):
        raise NotCapturable(
            f"{op}: the torch backend lists its calls on the host for each step, which a CUDA graph cannot "
            "capture; run eagerly, or use the CUDA kernels (`prefixkit env` says why they are not in use)"
        )
    if not plan:
        raise BadShape(f"{op}: plan must be the tensors of Step.plan, got none")
    bound = plan if isinstance(plan, BoundPlan) else find_plan(plan[-1])
    rows = bound.tree.queries.num_rows
    if rows != q.shape[0]:
        raise BadShape(f"{op}: the plan is for {rows} queries, but q has {q.shape[0]} rows")
    return bound


def run_program(
    program: Program,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``tree_attention`` by a program that was compiled for it; the arguments are the op's, and are checked."""
    if program.on_cpu:
        for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
            check_layout("tree_attention", name, pages)

    def read(call: Call) -> tuple[Tensor, Tensor]:
        return read_kv(call, k_pages, v_pages, q.dtype, on_cpu=program.on_cpu)

    with torch.no_grad():
        dtype = torch.float32 if variant.is_part else q.dtype
        return run_reading(program, q, read, scale, variant, sinks, dtype=dtype)


def run_reading(
    program: Program,
    q: Tensor,
    read: Read,
    scale: float,
    variant: Variant,
    sinks: Tensor | None = None,
    own: Own = NOTHING,
    dtype: torch.dtype = torch.float32,
) -> State:
    """The state of queries ``[T, heads, head_dim]`` over the K and V that ``read`` returns.

    The state is contiguous, with its output in ``dtype``; on a CPU it is computed in float32.
    """
    heads, inside = program.heads, torch.float32 if program.on_cpu else q.dtype
    queries = _queries(program, q, inside)
    numbers = heads.numbers(q.device) if variant.score_mods else None
    states = []
    for call in program.calls:
        # K and V of a call are gathered into the thread's scratch, so each call must finish before the next starts.
        k, v = read(call)
        count = call.batch * call.rows
        rows = pick(queries[call.grouped, call.descending], call.row, count)
        if call.places is not None and not call.biased:
            out, lse = scored_attention(call, call.places, own, variant, numbers, rows, k, v, heads, scale)
        else:
            assert isinstance(k, Tensor), "scores are computed for others"
            mask = biased_mask(call, variant, heads) if call.biased else call.mask
            out, lse = _kernel(call, mask, rows, k, v, heads, scale)
        # From [batch, heads, rows] to rows; the heads of a row are in the call's order.
        out = out.transpose(1, 2).reshape(count, heads.heads, heads.value_dim)
        lse = lse.transpose(1, 2).reshape(count, heads.heads)
        state = State(out, lse)
        states.append(_in_query_order(state, heads) if call.grouped and not program.grouped else state)
    if sinks is not None:
        sinks = sinks.to(torch.float32)
        if program.grouped:
            sinks = sinks.view(heads.kv_heads, heads.gqa_group).T.reshape(-1)
    shape = q.shape[0], heads.heads, heads.value_dim
    state = run_merge(program.merge, states, shape, q.device, program.may_be_empty, sinks)
    if variant.sums:  # means become sums
        state = State(state.out * state.lse.exp()[..., None], state.lse)
    if program.grouped:
        return _in_query_order(state, heads, dtype)
    return State(_dense(state.out, dtype), state.lse.contiguous())


def _queries(program: Program, q: Tensor, dtype: torch.dtype) -> dict[tuple[bool, bool], Tensor]:
    """The queries as calls read them, by ``(Call.grouped, Call.descending)``."""
    heads, found = program.heads, {}
    for grouped, descending in {(call.grouped, call.descending) for call in program.calls}:
        rows = q.view(q.shape[0], heads.kv_heads, heads.gqa_group, -1).transpose(1, 2) if grouped else q
        found[grouped, descending] = _dense(rows.flip(0) if descending else rows, dtype)
    return found


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor, contiguous and in a dtype; copied once at most."""
    if tensor.dtype == dtype:
        return tensor.contiguous()
    return tensor.to(dtype, memory_format=torch.contiguous_format)


def _in_query_order(state: State, heads: Heads, dtype: torch.dtype = torch.float32) -> State:
    """Reorder heads from ``(gqa_group, kv_heads)`` to ``(kv_heads, gqa_group)``; contiguous, ``out`` in a dtype."""
    rows, group, kv_heads = state.lse.shape[0], heads.gqa_group, heads.kv_heads
    out = state.out.view(rows, group, kv_heads, heads.value_dim).transpose(1, 2)
    lse = state.lse.view(rows, group, kv_heads).transpose(1, 2)
    return State(_dense(out, dtype).view(state.out.shape), lse.reshape(state.lse.shape))


def _kernel(
    call: Call, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, heads: Heads, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's flash attention: out and lse ``[batch, heads or kv_heads, rows or rows * gqa_group, ...]``."""
    gqa_group = heads.gqa_group if call.grouped else 1
    together, rows = heads.heads // gqa_group, call.rows * gqa_group
    step = together * heads.head_dim
    q = q.as_strided(
        (call.batch, together, rows, heads.head_dim), (rows * step, heads.head_dim, step, 1), q.storage_offset()
    )
    if heads.value_dim != heads.head_dim:  # the kernel takes one size; padding with zeros changes no product
        widest = max(heads.head_dim, heads.value_dim)
        q, k, v = (nn.functional.pad(x, (0, widest - x.shape[3])) for x in (q, k, v))
    out, lse = _flash(q, k, v, 0.0, call.causal, attn_mask=mask, scale=scale)
    empty = call.empty  # the kernel returns lse 0 for a row that sees no key
    if call.biased and mask is not None and bool((lse == 0).any()):
        empty = hidden_rows(mask)
    if empty is not None:
        lse.masked_fill_(empty, -torch.inf)
    return out if out.shape[3] == heads.value_dim else out[..., : heads.value_dim], lse
