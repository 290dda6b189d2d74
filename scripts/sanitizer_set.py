"""Small inputs for every kernel under compute-sanitizer, which is a hundred times slower; without pytest."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import pad

import prefixkit.backends  # noqa: F401  (registers them)
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.ops import library as ops

GPU = torch.device("cuda")


FP8 = torch.float8_e4m3fn


def append() -> None:
    for dtype, head_dim, held in (
        (torch.bfloat16, 128, torch.bfloat16),
        (torch.float32, 20, torch.float32),
        (torch.float16, 3, torch.float16),
        (torch.bfloat16, 128, FP8),
        (torch.float32, 20, FP8),
        (torch.float16, 3, FP8),
    ):
        key, value = (torch.randn(9, 3, head_dim, device=GPU).to(dtype) for _ in "kv")
        k_pages, v_pages = (torch.zeros(4, 3, 5, head_dim, device=GPU).to(held).transpose(1, 2) for _ in "kv")
        slots = torch.tensor([7, 1, 19, -1, 0, 3, 12, 5, 4], device=GPU)
        torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, slots)


def rotary_append() -> None:
    """Parts of one product, missing slots, and forms that run as torch and ``kv_append``."""
    for dtype, head_dim, held in (
        (torch.bfloat16, 128, torch.bfloat16),
        (torch.float16, 16, torch.float16),
        (torch.float32, 80, torch.float32),
        (torch.bfloat16, 6, torch.bfloat16),
        (torch.bfloat16, 128, FP8),
        (torch.float32, 80, FP8),
    ):
        parts = torch.randn(9, 4 + 2 * 2, head_dim, device=GPU).to(dtype).split([4, 2, 2], 1)
        cos, sin = (torch.randn(9, head_dim, device=GPU).to(dtype) for _ in "cs")
        pages = [torch.zeros(4, 2, 5, head_dim, device=GPU).to(held).transpose(1, 2) for _ in "kv"]
        slots = torch.tensor([7, 1, 19, -1, 0, 3, 12, 5, 20], device=GPU)
        rotated = torch.ops.prefixkit.rotary_append(*parts, cos, sin, *pages, slots)
        assert bool(torch.isfinite(rotated).all())


def tree_attention() -> None:
    """A chain with a star at its end: tile and decode items, partial states, nodes that begin inside pages, a prompt.

    Then the same with rows beyond the plan, as a captured graph pads its batch; and all of it over e4m3 too.
    """
    from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, make_snapshot
    from prefixkit.testing.gpu_forests import attend, fill, step_of

    multiprocessors = torch.cuda.get_device_properties(GPU).multi_processor_count
    for dtype, heads, page_size, cost, lengths in (
        (torch.bfloat16, (8, 2, 128), 16, SHARE_ALL, [300, 20, 5, 9, 1, 17]),
        (torch.float16, (7, 1, 64), 1, SHARE_ALL, [100, 7, 3, 30, 2, 40]),
        (torch.bfloat16, (2, 2, 128), 64, SHARE_NONE, [150, 64, 70, 1, 20, 33]),
        (torch.float16, (16, 2, 128), 16, SHARE_ALL, [40, 16, 16, 90, 2, 200]),
    ):
        rng = np.random.default_rng(page_size)
        snapshot, num_pages = make_snapshot(rng, [-1, 0, 1, 1, 1, 0], lengths, page_size)
        last = np.array([2, 3, 4, 5], dtype=np.int32)
        begin = snapshot.length[last] - np.array([1, 1, 1, snapshot.length[5]], dtype=np.int32)
        queries = Queries(last, begin, snapshot.length[last])
        snapshot.computed[last] = begin
        whole = fill(rng, snapshot, num_pages, queries, heads, dtype, GPU)
        for case in (whole, replace(whole, k_pages=whole.k_pages.to(FP8), v_pages=whole.v_pages.to(FP8))):
            step = step_of(case, cost, multiprocessors)
            out, lse = attend(case, step)
            assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())
            q, positions = pad(case.q, (0, 0, 0, 0, 0, 5)), pad(step.positions, (0, 5))
            plan = [*step.plan[:4], pad(step.plan[4], (0, 5)), *step.plan[5:]]  # merge_indptr, longer
            padded, padded_lse = torch.ops.prefixkit.tree_attention(
                q, case.k_pages, case.v_pages, positions, plan, case.scale, "causal"
            )
            assert torch.equal(padded[:-5], out) and torch.equal(padded_lse[:-5], lse)
            assert not bool(padded[-5:].any()) and bool((padded_lse[-5:] == -torch.inf).all())


def variants() -> None:
    """Masks and changed scores of both paths: captured tensors, numbers of sequences, classes of KV tiles.

    Some nodes begin inside pages at position 0, so that KV tiles have slots before the first element of a tensor.
    """
    from prefixkit.attention.variants import register, variant
    from prefixkit.testing.forests import SHARE_ALL, make_snapshot
    from prefixkit.testing.gpu_forests import fill, step_of

    table, bias = torch.rand(2, 8, device=GPU) < 0.5, torch.rand(512, 64, device=GPU)
    of = variant(
        lambda s, b, h, q, kv: 30 * torch.tanh(s / 30) + bias[kv, 0],
        lambda b, h, q, kv: table[b, kv // 64 % 8] & (bias[kv, 1] < 0.9) & (kv <= q),
        name="sanitized",
    )
    key, multiprocessors = register(of), torch.cuda.get_device_properties(GPU).multi_processor_count
    for dtype, heads, page_size in ((torch.bfloat16, (8, 2, 128), 16), (torch.float16, (7, 1, 64), 3)):
        rng = np.random.default_rng(page_size)
        parents = [-1, 0, 1, 1, 1, 0, *[-1] * 8]
        lengths = [300, 20, 5, 9, 1, 170, *rng.integers(40, 90, 8).tolist()]
        snapshot, num_pages = make_snapshot(rng, parents, lengths, page_size)
        last = np.array([2, 3, 4, *range(5, 14)], dtype=np.int32)
        begin = snapshot.length[last] - np.array([1, 1, 1, *lengths[5:]], dtype=np.int32)
        snapshot.computed[last] = begin
        queries = Queries(last, begin, snapshot.length[last], np.arange(12, dtype=np.int32) % 2)
        case = fill(rng, snapshot, num_pages, queries, heads, dtype, GPU)
        step = step_of(case, SHARE_ALL, multiprocessors)
        shape = [heads[0], heads[1], heads[2], heads[2]]
        classes = torch.ops.prefixkit.classify_blocks(step.positions, step.plan, shape, page_size, key)
        given = case.q, case.k_pages, case.v_pages, step.positions, [*step.plan, classes], case.scale, key
        out, _ = torch.ops.prefixkit.tree_attention(*given)
        assert bool(torch.isfinite(out).all())


def groups() -> None:
    """Plans as users make them: queries of 16 heads on the decode path, heads of 96 and 256, attention of two parts."""
    import prefixkit
    from prefixkit.variants import streaming_llm

    for heads, kv_heads, dim, variant in (
        (32, 2, 128, prefixkit.CAUSAL),
        (8, 4, 96, prefixkit.CAUSAL),
        (32, 2, 256, prefixkit.CAUSAL),
        (8, 2, 64, streaming_llm(4, 24)),
    ):
        pool = prefixkit.kv_pool(1, kv_heads, dim, 64, 16, device="cuda")
        for pages in pool.pages(0):
            pages.fill_(torch.nan)
        attention = prefixkit.TreeAttention(pool, heads, variant)
        tree, samples = prefixkit.tree_from_tokens(pool, [[*range(70), *[n] * n] for n in (3, 20, 41)])
        for _ in range(2):
            step = prefixkit.plan(attention, tree, samples)
            q, k, v = (torch.randn(step.num_rows, of, dim, device=GPU).bfloat16() for of in (heads, kv_heads, kv_heads))
            prefixkit.append(step, 0, k, v)
            out, lse = prefixkit.attend(step, 0, q)
            assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())
            prefixkit.commit(step)
            tree.extend_each(samples, np.zeros(3, dtype=np.int64))


def latents() -> None:
    """Both parts of attention over latents, over random K and V, and their merge; without products, since the tools
    report cuBLAS's kernels.
    """
    from prefixkit.attention.gpu.latent_cost import LatentCost
    from prefixkit.attention.latent_parts import LatentPart, Part
    from prefixkit.attention.sharing import HeadShape
    from prefixkit.backends.cuda.device_planner import PLAN_TENSORS
    from prefixkit.backends.cuda.latents.latent_planners import planner_for
    from prefixkit.testing.forests import make_snapshot

    heads, lengths = 72, [130, 20, 5, 70, 1]
    for page_size in (16, 3):
        rng = np.random.default_rng(page_size)
        snapshot, num_pages = make_snapshot(rng, [-1, 0, 0, 0, 0], lengths, page_size)
        leaf = np.arange(1, 5, dtype=np.int32)
        snapshot.computed[leaf] = snapshot.length[leaf] - 1
        tree = StepTree(snapshot, Queries(leaf, snapshot.length[leaf] - 1, snapshot.length[leaf]))
        parts = [LatentPart(part, HeadShape(heads, heads, 192, 2, 128), 512, 64) for part in Part]
        cost = LatentCost(absorbed=2e-6)  # the shared node alone is worth expanding
        planners = [planner_for(part, GPU, torch.bfloat16, 1, cost) for part in parts]
        if len(planners[0].plan(tree, GPU)[0].tensors) == 1:
            return  # no kernels for latents
        plans = [planner.plan(tree, GPU)[0] for planner in planners]
        made = plans[0].owners.slots.numel() // 64
        pages = [torch.randn(num_pages, page_size, 1, dim, device=GPU).bfloat16() for dim in (512, 64)]
        k, v = torch.randn(2, heads, made, 64, 128, device=GPU).bfloat16().permute(0, 2, 3, 1, 4)
        rotary = torch.randn(made, 64, 1, 64, device=GPU).bfloat16()
        q, absorbed = (torch.randn(4, heads, dim, device=GPU).bfloat16() for dim in (192, 576))
        at = torch.from_numpy(tree.positions).to(GPU)
        work = [plan.tensors[:PLAN_TENSORS] for plan in plans]
        of_made = torch.ops.prefixkit.tree_attention(q, k, v, at, work[0], 0.05, "causal", None, rotary)
        latent, lse = torch.ops.prefixkit.latent_attention(absorbed, *pages, at, work[1], 0.05)
        others = latent[..., :128].contiguous(), lse
        places = [plan.tensors[PLAN_TENSORS] for plan in plans]
        out = torch.ops.prefixkit.merge_states(*of_made, places[0], *others, places[1])
        assert bool(torch.isfinite(out).all())


def states() -> None:
    """Rows that continue in their slot, start in one that others read, write nothing or are padding; a last tile."""
    source, target = torch.tensor([[1, 5, 5, 2, 0], [1, 3, 4, -1, 0]], device=GPU)
    for dtype, heads, dim, size, width in (
        (torch.bfloat16, 4, 64, 128, 4),
        (torch.float16, 2, 70, 256, 3),
        (torch.float32, 6, 3, 16, 2),
    ):
        x = torch.randn(5, 300, device=GPU).to(dtype)
        weight, windows = (torch.randn(*of, 300, width, device=GPU).to(dtype) for of in ((), (6,)))
        out = torch.ops.prefixkit.conv_step(x, weight, weight[:, 0].contiguous(), windows, source, target, True)
        inputs, gate = torch.randn(2, 5, heads, dim, device=GPU).to(dtype)
        inward, outward = torch.randn(2, 5, 2, size, device=GPU).to(dtype)
        dt, held = torch.randn(5, heads, device=GPU).to(dtype), torch.randn(6, heads, dim, size, device=GPU)
        given = inputs, dt, -torch.rand(heads, device=GPU), inward, outward, dt[0], dt[1], gate, held, source, target
        assert bool(torch.isfinite(torch.ops.prefixkit.mamba2_step(*given)).all()) and bool(torch.isfinite(out).all())
        query, key = torch.randn(2, 5, 18, heads // 2, size, device=GPU).to(dtype) / size
        value, beta = (torch.randn(*of, device=GPU).to(dtype) for of in ((5, 18, heads, 2 * dim), (5, 18, heads)))
        held = torch.randn(6, heads, size, 2 * dim, device=GPU)
        given = query, key, value, -torch.rand(5, 18, heads, device=GPU), beta, True, held, source, target
        assert bool(torch.isfinite(torch.ops.prefixkit.delta_rule(*given)).all())
        assert bool(torch.isfinite(torch.ops.prefixkit.rms_norm(x[:, 1:], x[0, 1:], x[:, 1:], 1e-6, 1.0)).all())
    total = torch.zeros(1, dtype=torch.int64, device=GPU)
    torch.ops.prefixkit.digest(torch.arange(5000, device=GPU), 0, total)
    assert int(total)


def plan_tree() -> None:
    """Trees with shared and folded nodes, chunks and single queries, and deep ones, in buffers of just their size."""
    from prefixkit.attention.gpu.capacity import capacity_for
    from prefixkit.backends.cuda.plan_launch import GraphPlanner
    from prefixkit.testing.random_plans import deep_tree, held_by, random_cost, random_shape, random_tree, specified

    for seed in range(4):
        rng = np.random.default_rng(seed)
        snapshot, queries = random_tree(rng, int(rng.integers(2, 40)), 300, 40, 0.6)
        shape, cost = random_shape(rng), random_cost(rng)
        capacity = capacity_for(StepTree(snapshot, queries), shape, 132, cost)
        planner = GraphPlanner(shape, snapshot.num_nodes, capacity, GPU, cost, 132)
        planner.upload(StepTree(snapshot, queries))
        planner.plan()
        expected = specified(snapshot, queries, shape, cost, 132).arrays()
        assert all(np.array_equal(a, b) for a, b in zip(held_by(planner.work), expected, strict=True))
        deep = deep_tree(rng, 300)
        capacity = capacity_for(deep, shape, 132, cost, paths=deep.is_deep)
        planner = GraphPlanner(shape, deep.snapshot.num_nodes, capacity, GPU, cost, 132, paths=True)
        planner.upload(deep)
        planner.plan()
        expected = specified(deep.snapshot, deep.queries, shape, cost, 132, paths=deep.is_deep).arrays()
        assert all(np.array_equal(a, b) for a, b in zip(held_by(planner.work), expected, strict=True))


def sample() -> None:
    """Every mix of filters; rows of a block and of a cluster, in shared memory and read again; broken and idle rows."""
    from prefixkit.runners.sampler import Sampler
    from prefixkit.sampling.rng import uniforms
    from prefixkit.sampling.specification import SamplingBatch, sample_tokens
    from prefixkit.testing.sampling_cases import random_params, rows_of

    for vocab, dtype in (
        (17, torch.float32),
        (9001, torch.bfloat16),
        (40_000, torch.float16),
        (128_256, torch.float32),
    ):
        rng, rows = np.random.default_rng(vocab), 8
        params, logits = random_params(rng, rows, vocab), rows_of(rng, rows, vocab, dtype)
        histories = [rng.integers(0, vocab, 30) for _ in range(rows)]
        keys, steps = rng.integers(0, 2**64, rows, dtype=np.uint64), np.arange(rows)
        sampler = Sampler(rows + 1, vocab, GPU)
        sampler.upload_params(slice(0, rows), SamplingBatch(params, keys, steps, histories))
        there = torch.cat((logits, logits[:1])).to(GPU)
        tokens, _ = sampler.sample(there)
        expected, _ = sample_tokens(logits.float(), params, uniforms(keys, steps), histories)
        assert tokens[:rows].tolist() == expected.tolist()
        sampler.select_rows(torch.arange(rows - 1, -1, -1, device=GPU))
        there[3, 5] = torch.nan
        sampler.sample(there)
        assert int(sampler.tokens[3]) == -1


_EVERY = append, rotary_append, tree_attention, variants, groups, latents, states, plan_tree, sample
PARTS = {part.__name__: part for part in _EVERY}


def main() -> None:
    assert ops.SCHEMAS
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
    torch.cuda.synchronize()
    print("ran the sanitizer's set")


if __name__ == "__main__":
    main()
