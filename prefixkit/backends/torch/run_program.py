"""``tree_attention`` in plain torch: running a program, all that the layers of a model wait for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from prefixkit.attention.variants import ScoreMod, Variant, lookup
from prefixkit.backends.torch import tuning
from prefixkit.backends.torch.attention_calls import Call, Positions
from prefixkit.backends.torch.host_planner import BoundPlan, find_plan
from prefixkit.backends.torch.layer_program import Program
from prefixkit.backends.torch.merge import State, pick, run_merge
from prefixkit.backends.torch.tuning import Heads
from prefixkit.ops.arguments import BadShape, capturing, check_attention
from prefixkit.ops.backend import NotCapturable

# Returns the softmax's natural log-sum-exp besides the output, reads strided keys, and shares KV heads among query
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
) -> tuple[Tensor, Tensor]:
    """``tree_attention``; ``plan`` ends with the handle of a ``BoundPlan`` (see ``host_planner``), or is one."""
    check_attention(q, k_pages, v_pages, q_positions, lookup(variant), sinks)
    if capturing(q):
        raise NotCapturable(
            "tree_attention: the torch backend lists its calls on the host for each step, which a CUDA graph cannot "
            "capture; run eagerly, or use the CUDA kernels (`prefixkit env` says why they are not in use)"
        )
    if not plan:
        raise BadShape("tree_attention: plan must be the tensors of Step.plan, got none")
    bound = plan if isinstance(plan, BoundPlan) else find_plan(plan[-1])
    rows = bound.tree.queries.num_rows
    if rows != q.shape[0]:
        raise BadShape(f"tree_attention: the plan is for {rows} queries, but q has {q.shape[0]} rows")
    program = bound.program(k_pages.shape, q.shape[1], q.dtype, q.device, variant)
    return run_program(program, q, k_pages, v_pages, scale, lookup(variant), sinks)


def run_program(
    program: Program,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``tree_attention`` by a program that was made for it; arguments as the op's, checked."""
    if program.on_cpu:
        _check_layout(k_pages, v_pages)
    with torch.no_grad():
        sinks = None if sinks is None else sinks.to(torch.float32)
        state = _run(program, q.to(torch.float32) if program.on_cpu else q, k_pages, v_pages, scale, variant, sinks)
        return state.out.to(q.dtype), state.lse


def _check_layout(k_pages: Tensor, v_pages: Tensor) -> None:
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        _, page_size, kv_heads, head_dim = pages.shape
        per_page, per_token, per_head, _ = pages.stride()
        if per_page != page_size * per_token or (kv_heads > 1 and per_head != head_dim):
            raise BadShape(
                f"tree_attention: on the CPU {name} must be token-major, with slots evenly spaced and a token's heads "
                f"adjacent, got shape {list(pages.shape)} and strides {list(pages.stride())}; make it with KVPool"
            )


def _run(
    program: Program,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    variant: Variant,
    sinks: Tensor | None,
) -> State:
    """One program on queries ``[T, heads, head_dim]``; the state comes back contiguous, in query-head order."""
    heads = program.heads
    q = grouped = q.contiguous()
    if any(call.grouped for call in program.calls):
        grouped = q.view(-1, heads.kv_heads, heads.gqa_group, heads.head_dim).transpose(1, 2).contiguous()
    numbers = heads.numbers(q.device) if variant.score_mod is not None else None
    states = []
    for call in program.calls:
        # K and V of a call are gathered into the thread's scratch, so a call must finish before the next begins.
        if program.on_cpu:
            k, v = _keys(call, k_pages, heads, 0), _keys(call, v_pages, heads, 1)
        else:
            k, v = _gathered(call, k_pages, heads), _gathered(call, v_pages, heads)
        count = call.batch * call.rows
        rows = pick(grouped if call.grouped else q, call.row, count)
        if call.positions is not None:
            out, lse = _scored(call, call.positions, variant.score_mod, numbers, rows, k, v, heads, scale)
        else:
            out, lse = _kernel(call, rows, k, v, heads, scale)
        # From [batch, heads, rows] to rows; heads of a matrix are in the call's order.
        out = out.transpose(1, 2).reshape(count, heads.heads, heads.head_dim)
        lse = lse.transpose(1, 2).reshape(count, heads.heads)
        if call.empty is not None:
            lse.masked_fill_(call.empty, -torch.inf)  # the kernel says 0 for a row that sees nothing
        state = State(out, lse)
        states.append(_in_query_order(state, heads) if call.grouped and not program.grouped else state)
    if sinks is not None and program.grouped:
        sinks = sinks.view(heads.kv_heads, heads.gqa_group).T.reshape(-1)
    state = run_merge(program.merge, states, q, program.may_be_empty, sinks)
    state = _in_query_order(state, heads) if program.grouped else state
    return State(state.out.contiguous(), state.lse.contiguous())


def _in_query_order(state: State, heads: Heads) -> State:
    """Heads from the order ``(gqa_group, kv_heads)`` to ``(kv_heads, gqa_group)``, contiguous."""
    if heads.gqa_group == 1:
        return state
    out = state.out.view(-1, heads.gqa_group, heads.kv_heads, heads.head_dim).transpose(1, 2)
    lse = state.lse.view(-1, heads.gqa_group, heads.kv_heads).transpose(1, 2)
    return State(out.reshape(state.out.shape), lse.reshape(state.lse.shape))


class Scratch(threading.local):
    """Buffers that a CPU thread keeps until it ends: fresh ones would cost a page fault per 4 KB, as much as filling
    them.

    There are six at most, for keys and for values in three dtypes, each of up to ``Tuning.call_elements`` elements,
    so a thread keeps 256 MiB at most, and 128 MiB while all is float32.  What a call needs beyond that is its own.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def matrix(self, use: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[rows, width]`` for keys (``use`` 0) or values (1), with anything in it."""
        elements = rows * width
        buffer = self.buffers.get((use, dtype))
        if buffer is None or buffer.shape[0] < elements:
            with torch.inference_mode(False):  # a tensor born in inference mode could not be written outside it
                buffer = torch.empty(elements, dtype=dtype, device="cpu")
            if elements <= tuning.CPU.call_elements:
                self.buffers[use, dtype] = buffer
        return buffer.as_strided((rows, width), (width, 1))


_scratch = Scratch()


def _keys(call: Call, pages: Tensor, heads: Heads, use: int) -> Tensor:
    """``[batch, kv_heads, length, head_dim]`` float32 keys or values: a view of token-major pages if possible."""
    tokens, width = call.batch * call.length, heads.kv_elements
    slots = pages.as_strided((pages.shape[0] * pages.shape[1], width), (pages.stride(1), 1))
    if isinstance(call.slot, int):
        keys = slots.narrow(0, call.slot, tokens)
    else:
        keys = _scratch.matrix(use, tokens, width, slots.dtype)
        torch.index_select(slots, 0, call.slot, out=keys)
    if keys.dtype != torch.float32:
        keys = _scratch.matrix(use, tokens, width, torch.float32).copy_(keys)
    step = keys.stride(0)
    shape = (call.batch, heads.kv_heads, call.length, heads.head_dim)
    return keys.as_strided(shape, (call.length * step, heads.head_dim, step, 1))


def _gathered(call: Call, pages: Tensor, heads: Heads) -> Tensor:
    """``[batch, kv_heads, length, head_dim]`` a copy of a call's keys or values, from pages of any layout."""
    assert isinstance(call.slot, Tensor), "only a program for a CPU reads keys where they lie"
    size = pages.shape[1]
    keys = pages[call.slot // size, call.slot % size]
    return keys.reshape(call.batch, call.length, heads.kv_heads, heads.head_dim).transpose(1, 2)


def _kernel(call: Call, q: Tensor, k: Tensor, v: Tensor, heads: Heads, scale: float) -> tuple[Tensor, Tensor]:
    """torch's flash attention: out and lse ``[batch, heads or kv_heads, rows or rows * gqa_group, ...]``."""
    gqa_group = heads.gqa_group if call.grouped else 1
    together, rows = heads.heads // gqa_group, call.rows * gqa_group
    step = together * heads.head_dim
    q = q.as_strided(
        (call.batch, together, rows, heads.head_dim), (rows * step, heads.head_dim, step, 1), q.storage_offset()
    )
    out, lse = _flash(q, k, v, 0.0, call.causal, attn_mask=call.mask, scale=scale)
    return out, lse


def _scored(
    call: Call,
    positions: Positions,
    score_mod: ScoreMod | None,
    numbers: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Scores in memory: out and lse ``[batch, heads, rows, ...]``; a row that sees nothing comes out empty."""
    batch, rows, gqa_group, kv_heads = call.batch, call.rows, heads.gqa_group, heads.kv_heads
    q = q.view(batch, rows, kv_heads, gqa_group, heads.head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, gqa_group * rows, heads.head_dim)
    k, v = (states.reshape(batch * kv_heads, call.length, heads.head_dim) for states in (k, v))
    score = _product(q, k.transpose(1, 2)).mul_(scale).view(batch, heads.heads, rows, call.length)
    if score_mod is not None:
        assert numbers is not None, "made for it"
        score = score_mod(score, *positions, numbers).to(torch.float32)
    if call.mask is not None:
        score = score.masked_fill(~call.mask, -torch.inf)
    top = score.amax(dim=-1, keepdim=True)
    top = top.masked_fill_(top == -torch.inf, 0.0)
    weight = torch.exp(score - top)
    total = weight.sum(dim=-1, keepdim=True)
    out = _product(weight.to(v.dtype).view(batch * kv_heads, gqa_group * rows, call.length), v)
    out = out.view(batch, heads.heads, rows, heads.head_dim) / total.masked_fill(total == 0, 1.0)
    return out, (top + total.log()).squeeze(-1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for batches of matrices, summed and returned in float32."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b, out_dtype=torch.float32)
