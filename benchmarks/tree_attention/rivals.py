"""Other implementations of the same attention, each in its best configuration: layouts are made before the timing.

A rival takes inputs and returns a function from an input set's number to ``[rows, heads, head size]``, or raises Unfit.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.runner import failure, input_sets, replay_us
from benchmarks.tree_attention.inputs import GPU, Inputs
from benchmarks.tree_attention.workloads import PAGE, Level

Run = Callable[[int], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

MOST_DIFFERENCE = 0.02  # two bf16 kernels differ by rounding: about 0.3% of the output's norm
MOST_EXPANDED_BYTES = 20e9  # with more, expanded KV takes milliseconds, and sharing hundreds of microseconds


class Unfit(Exception):
    """A rival cannot run, or is not worth running; the message says why."""


def outcome(
    prepare: Callable[[], Run], expected: Tensor, sets: int, of: Callable[..., Tensor] = torch.clone, digits: int = 2
) -> float | str:
    """A rival's microseconds, or why there are none; ``of``: takes the part of its answer that is ``expected``."""
    try:
        run = prepare()
        difference = float((of(run(0)).float() - expected.float()).norm() / expected.float().norm())
        if not difference < MOST_DIFFERENCE:
            return f"differs from ours by {difference:.3f} of the norm"
        return round(replay_us(run, sets), digits)
    except Unfit as error:
        return str(error)
    except Exception as error:
        return failure(error)


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's flash attention, no mask: ``out``, ``lse [batch, heads, rows]``."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[:2]


def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same by cuDNN."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = attend(q, k, v, None, True, 0.0, False, False, scale=scale)[:2]
    return out, lse.view(out.shape[:3])


def attend_levels(
    q: Tensor, kv: list[list[Tensor]], attends: list[Attend], scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Partial states of levels, one call each, the queries below a node as one long sequence.

    ``q [kv_heads, rows * group, head size]``, K and V of each level ``[nodes, kv_heads, tokens, head size]``.
    """
    rows = (q.view(len(q), len(k), -1, q.shape[2]).transpose(0, 1) for k, _ in kv)
    return [attend(x, k, v, scale) for attend, x, (k, v) in zip(attends, rows, kv, strict=True)]


def hydragen(attend: Attend, inputs: Inputs) -> Run:
    """Hydragen: the levels' partial states, and one fused merge."""
    from benchmarks.tree_attention.merge import merge

    found, sets = _regular(inputs), range(inputs.sets)
    # On each level, group the query heads of one KV head.
    q = [of.unflatten(1, (inputs.workload.kv_heads, -1)).transpose(0, 1).flatten(1, 2) for of in inputs.q]
    kv = [[[inputs.dense(level, of[i]) for of in (inputs.k, inputs.v)] for level in found] for i in sets]

    def run(index: int) -> Tensor:
        parts = attend_levels(q[index], kv[index], [attend] * len(found), inputs.scale)
        outs, lses = (list(of) for of in zip(*parts, strict=True))
        return merge(outs, lses, [level.rows for level in found], inputs.workload.heads)

    return run


def expanded(attend: Attend, inputs: Inputs) -> Run:
    """Attention that shares nothing: every sequence's KV in full, read once for all query heads of a KV head."""
    found, workload, rows = _regular(inputs), inputs.workload, inputs.step.num_rows
    needed = 4.0 * workload.head_dim * workload.kv_heads * workload.tokens_seen
    if needed > MOST_EXPANDED_BYTES:
        raise Unfit(f"expanded KV takes more than {MOST_EXPANDED_BYTES / 1e9:.0f} GB")

    def expand(pages: Tensor) -> Tensor:
        return torch.cat([inputs.dense(of, pages).repeat_interleave(of.rows, dim=0) for of in found], dim=2)

    sets = min(inputs.sets, input_sets(int(needed)))  # large KV passes through the L2 by itself
    kv = [[expand(pages[i]) for pages in (inputs.k, inputs.v)] for i in range(sets)]
    q = [inputs.q[i].view(rows, workload.kv_heads, -1, workload.head_dim) for i in range(sets)]

    def run(index: int) -> Tensor:
        k, v = kv[index % sets]
        return attend(q[index % sets], k, v, inputs.scale)[0].reshape(rows, workload.heads, workload.head_dim)

    return run


def _regular(inputs: Inputs) -> list[Level]:
    if (found := inputs.levels) is None:
        raise Unfit("nodes of one depth differ in length or in queries")
    return found


FLEX_WORKLOADS = {
    *(f"32/8 2L b{b} p{p} s128" for b, p in ((256, 1024), (256, 4096), (1024, 1024), (1024, 4096))),
    *("8/1 2L b256 p4096 s128", "32/32 2L b256 p4096 s128", "32/8 3L fewshot", "32/8 comb d64 b8 t64 s128"),
}


def flex(inputs: Inputs) -> Run:
    """FlexAttention, compiled: all queries as one sequence, all tokens as another, a block mask of the tree."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    workload = inputs.workload
    if str(workload) not in FLEX_WORKLOADS:
        raise Unfit("every shape compiles for seconds, and fewer than 128 queries not at all; run on a few workloads")
    snapshot = workload.snapshot
    if (np.diff(inputs.page_order) < 0).any() or (snapshot.length % PAGE).any():
        raise Unfit("pages are not in order")
    # For each token, in the order of the pages: the first query that sees it, and one past the last.
    before = np.concatenate(([0], np.cumsum(np.isin(np.arange(snapshot.num_nodes), workload.leaf))))
    bounds = before[:-1], before[snapshot.subtree_end]
    low, high = (torch.from_numpy(np.repeat(of, snapshot.length)).to(GPU) for of in bounds)

    def sees(batch: Tensor, head: Tensor, q_row: Tensor, token: Tensor) -> Tensor:
        return (low[token] <= q_row) & (q_row < high[token])

    mask = create_block_mask(sees, None, None, inputs.step.num_rows, len(low), device=low.device)
    torch._dynamo.reset()  # dynamo gives up on the ninth shape
    compiled = torch.compile(flex_attention, fullgraph=True)
    options = {"block_mask": mask, "scale": inputs.scale, "enable_gqa": workload.heads != workload.kv_heads}
    q = [of.transpose(0, 1)[None].contiguous() for of in inputs.q]
    each = zip(inputs.k, inputs.v, strict=True)
    flat = [[kv.transpose(0, 1).reshape(1, workload.kv_heads, -1, workload.head_dim) for kv in pair] for pair in each]
    assert len(low) == flat[0][0].shape[2]
    return lambda index: compiled(q[index], *flat[index], **options)[0].transpose(0, 1)


def flashinfer(inputs: Inputs, cascade: bool) -> Run:
    """FlashInfer's cascade over the same pages, or its paged decode, which reads them per sequence; plans are made."""
    try:
        import flashinfer as library
    except ImportError as error:
        raise Unfit("flashinfer is not installed") from error
    found, space = _regular(inputs), torch.empty(512 << 20, dtype=torch.uint8, device=GPU)
    sizes = inputs.workload.heads, inputs.workload.kv_heads, inputs.workload.head_dim, PAGE
    options = {"sm_scale": inputs.scale, "q_data_type": torch.bfloat16}
    if cascade:
        wrapper = library.MultiLevelCascadeAttentionWrapper(len(found), space, "HND")
        queries = [_steps(len(level.pages), level.rows) for level in found]
        pages = zip(*(_pages(level.pages) for level in found), strict=True)
        wrapper.plan(queries, *(list(of) for of in pages), *sizes, causal=False, **options)
    else:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        each = np.concatenate([np.repeat(level.pages, level.rows, axis=0) for level in found], axis=1)
        wrapper.plan(*_pages(each), *sizes, kv_data_type=torch.bfloat16, **options)
    return lambda index: wrapper.run(inputs.q[index], (inputs.k[index], inputs.v[index]))


def _pages(pages: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """From ``[sequences, pages]``: the offset of each sequence's pages, all pages, and the tokens of each last page."""
    table = torch.from_numpy(pages.reshape(-1).copy()).int().to(GPU)
    return _steps(*pages.shape), table, torch.full((len(pages),), PAGE, dtype=torch.int32, device=GPU)


def _steps(count: int, step: int) -> Tensor:
    return torch.arange(0, (count + 1) * step, step, dtype=torch.int32, device=GPU)


RIVALS: dict[str, Callable[[Inputs], Run]] = {
    "hydragen_flash": partial(hydragen, flash),
    "hydragen_cudnn": partial(hydragen, cudnn),
    "sdpa_flash": partial(expanded, flash),
    "sdpa_cudnn": partial(expanded, cudnn),
    "flex": flex,
    "flashinfer_cascade": partial(flashinfer, cascade=True),
    "flashinfer_decode": partial(flashinfer, cascade=False),
}
